"""Metrics of the active run: the user's scalars, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.errors import ConfigError
from elche.monitor.trace import Span
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.report.run_summary import RunSummary, summarise
from elche.runtime.report.timeline import save_timeline
from elche.runtime.report.trackers import Tracker
from elche.session.process import needed, process


def log_scalar(name: str, value: float | torch.Tensor) -> None:
    """Logs a number measured on the current batch; its means are in the metrics.

    The value is weighted by the samples of this rank's batch, or by ``weight_of``, so
    the mean over ranks equals the mean over samples. A tensor may be on any device, and
    nothing waits for it: a value not computed when a window ends counts in a later
    window of the epoch. Outside the loop over the loader nothing is logged, so a loss
    function that logs may be used for evaluation as well.

    Args:
        name: name of the scalar.
        value: a real number, or a tensor that holds one.

    Raises:
        ConfigError: there is no run yet, the name is invalid, or the value is not a
            real scalar.
    """
    view = needed(current_metrics(), "log_scalar")
    if name in view.reserved:
        raise ConfigError(f"the Trainer itself logs {name!r}; choose another name")
    view.log(name, value)


def batch_weight() -> float:
    """Weight of the current batch on this rank: samples, or ``weight_of``.

    Under ``sync`` some ranks get no samples of a batch with fewer samples than ranks
    (with BatchNorm layers, fewer than two per rank). Such a rank runs its loop body on
    samples that another rank counts, so that all take the same step. Its weight is then
    0: exclude the batch from sums, predictions and stored results. Outside the loop the
    weight is 0, too.

    Raises:
        ConfigError: there is no run yet.
    """
    return needed(current_metrics(), "batch_weight").current_weight


def metrics() -> list[WindowMetrics]:
    """Metrics of the windows that have ended since the last call; does not wait.

    Available on rank 0, and in a run of one rank, where a window is about a second. The
    last ones stay readable after the run. On other ranks the list is empty. Only the
    newest 1000 windows are kept.
    """
    return [] if process.metrics is None else process.metrics.windows()


def epoch_metrics(
    epoch: int | None = None, timeout_s: float | None = None
) -> EpochMetrics:
    """Metrics of an epoch, on any rank.

    Returns at once if the epoch has ended. A thread other than the training thread
    waits for its end, as long as the run lives. Metrics of an epoch that was left by
    ``break`` cover the part that was run.

    They are equal on every rank. But in a run of more than 64 ranks only rank 0
    receives values per rank: on the others, tuples hold a single value for all ranks.

    Args:
        epoch: number of the epoch, from 0; None for the last one that has ended, or the
            first if none has.
        timeout_s: most seconds to wait.

    Raises:
        ConfigError: there is no run, the training thread would wait for itself, or the
            epoch is so old that its metrics are forgotten.
        RemoteRankError: another rank failed meanwhile.
        CommunicationError: the run ended before the epoch did.
        DeadlineError: the epoch did not end within ``timeout_s``.
    """
    return needed(process.metrics, "epoch_metrics").epoch(epoch, timeout_s)


def timeline(path: str | Path | None = None) -> list[Span]:
    """Timeline of this rank: waits for data, batches, synchronisations.

    Times are of the host's monotonic clock, which its ranks share. The newest 200,000
    batches are kept. ``elche run --trace FILE`` writes all ranks' timelines.

    Args:
        path: file for it as a Chrome trace, which ui.perfetto.dev opens.

    Raises:
        ConfigError: there is no run yet, or the file cannot be written.
    """
    own = needed(process.timeline, "timeline")
    if path is not None:
        save_timeline(Path(path), own)
    return own.newest()


def summary() -> RunSummary:
    """The run so far: devices, memory, transport, policy and reason, speeds, shares.

    ``print(elche.summary())`` shows it. The figures are of the last finished epoch;
    before the first one, on rank 0, of the last window. May be called on one rank
    alone, and after the run.

    Raises:
        ConfigError: there is no run yet.
    """
    view = needed(process.metrics, "summary")
    return summarise(needed(process.facts, "summary"), view.notifications)


def log_to(writer: Any) -> None:
    """Logs the metrics of this and later runs of the process to a tracker.

    Rank 0 logs at the run's global steps. For each window (under ``sync`` about ten a
    second) it logs the means of `log_scalar`'s values and ``elche/samples_per_s``,
    ``elche/efficiency``, ``elche/share/RANK``; for each epoch, means as ``epoch/NAME``.
    May be called several times, before or after `elche.setup`. A writer that raises is
    logged and removed.

    Args:
        writer: with ``add_scalar(name, value, step)``, as torch's SummaryWriter; or
            with ``log(values, step=)``, as a W&B run or the modules ``wandb`` and
            ``trackio``. None: stop all logging.

    Raises:
        ConfigError: ``writer`` has neither method.
    """
    if writer is None:
        process.trackers.clear()
    else:
        process.trackers.append(Tracker(writer))


def current_metrics() -> MetricsView | None:
    """The view of the active run, None if there is none."""
    return None if process.run is None else process.metrics
