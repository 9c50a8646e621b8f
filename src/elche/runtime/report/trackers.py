"""Metrics of a run in experiment trackers: TensorBoard, W&B, trackio and their like."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.errors import ConfigError

logger = logging.getLogger(__name__)

RANKS_LOGGED = 64


class Tracker:
    """A user's writer, which takes scalars by name at a step.

    Args:
        writer: has ``add_scalar(name, value, step)``, as torch's SummaryWriter, or
            ``log(values, step=)``, as a W&B run and the modules ``wandb``, ``trackio``.

    Raises:
        ConfigError: the writer has neither.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._has_add_scalar = callable(getattr(writer, "add_scalar", None))
        if not (self._has_add_scalar or _logs_by_step(writer)):
            raise ConfigError(
                "expected elche.log_to() to get a writer with add_scalar(name, value, "
                "step), as a SummaryWriter, or with log(values, step=), as a W&B run; "
                f"got {type(writer).__name__}"
            )

    def write(self, values: dict[str, float], step: int) -> None:
        """Passes values to the writer."""
        if not self._has_add_scalar:
            self._writer.log(values, step=step)
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flushes a SummaryWriter."""
        if self._has_add_scalar and callable(getattr(self._writer, "flush", None)):
            self._writer.flush()


class TrackedMetrics:
    """Logs the metrics of one run at its global steps.

    Args:
        trackers: trackers to log to; one that raises is removed.
        steps_at: returns the run's steps at a number of samples of the epoch.
    """

    def __init__(
        self, trackers: list[Tracker], steps_at: Callable[[float], float]
    ) -> None:
        self._trackers = trackers
        self._steps_at = steps_at
        self._epoch = -1
        self._samples = self._step = 0

    def take(self, metrics: WindowMetrics | EpochMetrics) -> None:
        """Logs a window or an epoch that has ended."""
        if metrics.epoch != self._epoch:
            self._epoch, self._samples = metrics.epoch, 0
        is_window = isinstance(metrics, WindowMetrics)
        if is_window:
            self._samples += metrics.samples
        self._step = max(self._step, round(self._steps_at(self._samples)))
        values = values_of(metrics) if self._trackers else {}
        for tracker in tuple(self._trackers):
            try:
                if values:
                    tracker.write(values, self._step)
                if not is_window:
                    tracker.flush()
            except Exception:
                logger.exception(
                    "elche.log_to(): the writer failed; nothing more is logged to it, "
                    "training continues"
                )
                self._trackers.remove(tracker)


def values_of(metrics: WindowMetrics | EpochMetrics) -> dict[str, float]:
    """Scalars of a window or an epoch, by name.

    A scalar of which all values were NaN or Inf is NaN.
    """
    logged = {**dict.fromkeys(metrics.non_finite, math.nan), **metrics.scalars}
    if isinstance(metrics, EpochMetrics):
        return {f"epoch/{name}": value for name, value in logged.items()}
    return logged | {
        "elche/samples_per_s": metrics.samples_per_s,
        "elche/efficiency": metrics.efficiency,
        **{
            f"elche/share/{rank}": share
            for rank, share in enumerate(metrics.shares[:RANKS_LOGGED])
        },
    }


def _logs_by_step(writer: Any) -> bool:
    log = getattr(writer, "log", None)
    if not callable(log):
        return False
    try:
        return "step" in inspect.signature(log).parameters
    except (TypeError, ValueError):
        return True
