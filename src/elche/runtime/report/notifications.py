"""Metrics and policy notifications."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from elche.cadence.split import whole_sample_bound
from elche.coordination.accounts.batch_ranges import named
from elche.coordination.accounts.metrics import (
    EPOCHS_KEPT,
    WINDOWS_KEPT,
    EpochMetrics,
    WindowMetrics,
)
from elche.coordination.protocol.instructions import MetricsReported, PolicyChosen
from elche.errors import NonFiniteError
from elche.runtime.data.positions import EpochPositions
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.scaler_watch import NAME as SCALER_SKIPS

logger = logging.getLogger(__name__)

KEYS_SHOWN = 64
RANKS_SHOWN = 16
MOST_EFFICIENCY = 1.02
"""Limit of 1, with a margin for rounding and times of the last batch."""


class RunNotifications:
    """Keeps metrics for the user, and emits notifications of the run.

    Args:
        rank: this rank.

    Attributes:
        scalars: scalars logged on this rank.
        window_metrics: metrics of finished windows; filled on rank 0 only.
        epoch_metrics: metrics of the last finished epochs.
        choices: policy and reason of each choice of ``auto``; only on rank 0.
        advice: expected gain of a policy other than the default; only on rank 0.
        on_metrics: called with the metrics of each window and epoch that has ended.
        emit: writes a line for the user.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.scalars = ScalarLog()
        self.window_metrics: deque[WindowMetrics] = deque(maxlen=WINDOWS_KEPT)
        self.epoch_metrics: deque[EpochMetrics] = deque(maxlen=EPOCHS_KEPT)
        self.choices: list[tuple[str, str]] = []
        self.advice = ""
        self.on_metrics: Callable[[EpochMetrics | WindowMetrics], None] | None = None
        self.emit: Callable[[str], None] = logger.info

    def handle(self, report: MetricsReported | PolicyChosen) -> None:
        """Keeps the metrics of a window or an epoch; emits a choice of ``auto``."""
        if isinstance(report, MetricsReported):
            kind = EpochMetrics if report.window < 0 else WindowMetrics
            self.add(kind.from_json(report.values))
        elif report.is_advice:
            self.advice = report.reason
            self.emit(f"elche: {report.reason}")
        else:
            self.choices.append((report.policy, report.reason))
            self.emit(f"elche: auto: {report.reason}")

    def summary(self, policy: str, in_force: str) -> str:
        """One line on the last epoch: gain, shares and policy; "" if nothing is known.

        The gain is the run's throughput over the fastest rank's outside reductions, so
        it includes waits and reductions. A gain above all ranks' summed throughput is
        an artefact of measuring, and is omitted.

        Args:
            policy: policy of the run.
            in_force: policy under which the last epoch ended.
        """
        last = self.epoch_metrics[-1] if self.epoch_metrics else None
        if last is None or len(last.shares) < 2 or not any(last.rank_samples_per_s):
            return ""
        ratio = last.samples_per_s / max(last.rank_samples_per_s)
        gain = f"{ratio:.2f} times the fastest device's own speed; "
        if last.efficiency > MOST_EFFICIENCY:
            gain = ""
        rates = zip(last.shares, last.rank_samples_per_s, strict=True)
        took_part = [share for share, rate in rates if share or rate]
        shown = [f"{100 * share:.0f} %" for share in took_part[:RANKS_SHOWN]]
        more = len(took_part) - len(shown)
        shares = ", ".join([*shown, f"and {more} more"] if more else shown)
        chosen = f" ({in_force})" if in_force != policy else ""
        return f"elche: last epoch: {gain}shares {shares}; policy {policy}{chosen}"

    def whole_sample_bound(self, batch_size: int) -> str:
        """One line on the cost of whole-sample shares under ``sync``; "" if small.

        Args:
            batch_size: samples of a global batch.
        """
        last = self.epoch_metrics[-1] if self.epoch_metrics else None
        rates = last.rank_samples_per_s if last else ()
        sample_s = [1.0 / rate for rate in rates if rate]
        bound = whole_sample_bound(batch_size, sample_s)
        if bound is None:
            return ""
        left, enough = bound
        advice = f"; from batch {enough} on they cost under 2 %" if enough else ""
        return (
            f"elche: shares of whole samples limit a batch of {batch_size} to "
            f"{left:.2f} of the devices' speed{advice}"
        )

    def add(self, metrics: EpochMetrics | WindowMetrics) -> None:
        """Keeps the metrics of a window or an epoch that has ended."""
        if self.on_metrics is not None:
            self.on_metrics(metrics)
        if isinstance(metrics, WindowMetrics):
            self.window_metrics.append(metrics)
            return
        self.epoch_metrics.append(metrics)
        skipped = metrics.scalars.get(SCALER_SKIPS, 0.0)
        if skipped and self._rank == 0:
            logger.info(
                "epoch %d: GradScaler skipped %.2g %% of the optimizer's steps, "
                "where gradients overflowed; their samples count as done",
                metrics.epoch,
                100 * skipped,
            )


def warn_discarded(
    rank: int, batches: Sequence[tuple[int, int]], positions: EpochPositions
) -> None:
    """Warns that this rank's update is discarded, with its batches and samples.

    Args:
        rank: this rank.
        batches: batches of the update, as ranges.
        positions: the epoch.
    """
    logger.warning(
        "rank %d: the update of epoch %d from batches %s contains NaN or Inf "
        "and is discarded; these batches are not trained on again, and windows of this "
        "rank have one batch until its update is finite; samples %s",
        rank,
        positions.epoch,
        named(batches),
        _shown(samples_in(positions, batches)),
    )


def samples_in(
    positions: EpochPositions, batches: Sequence[tuple[int, int]]
) -> list[Any]:
    """The dataset's keys of these batches (start, stop)."""
    return [
        key
        for start, stop in batches
        for batch in range(start, stop)
        for key in positions.index_batch(batch).keys
    ]


def with_samples(error: NonFiniteError, positions: EpochPositions) -> NonFiniteError:
    """Adds the samples of its batches to an error, unless it has them."""
    if error.samples:
        return error
    keys = samples_in(positions, error.batches)
    if error.part:
        keys = keys[slice(*error.part)]
    if not keys:
        return error
    return NonFiniteError(
        f"{error}; samples {_shown(keys)}",
        error.rank,
        error.batches,
        error.part,
        keys,
    )


def _shown(keys: Sequence[Any]) -> str:
    more = f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else ""
    return f"{keys[:KEYS_SHOWN]}{more}"
