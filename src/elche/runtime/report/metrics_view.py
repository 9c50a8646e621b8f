"""User-facing view of a run's metrics, on one device or on several."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import torch

from elche.coordination.accounts.metrics import (
    EpochMetrics,
    WindowMetrics,
)
from elche.errors import CommunicationError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from elche.runtime.run import Run
    from elche.runtime.single import SingleRun

POLL_S = 0.02


class MetricsView:
    """Logs scalars and returns metrics; created in the training thread.

    Args:
        source: the run.

    Attributes:
        notifications: notifications of the run, kept after its end.
        reserved: names under which users may not log.
        part: fraction (0 to 1) of the current batch that logged values stand for.
    """

    def __init__(self, source: Run | SingleRun) -> None:
        self.reserved: frozenset[str] = frozenset()
        self.part = 1.0
        self._source: Run | SingleRun | None = source
        self.notifications = source.notifications
        self._training = threading.current_thread()
        self._ended = threading.Event()

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Adds a value with the weight of the current batch."""
        if self._source is not None:
            weight = self._source.current_weight * self.part
            self._source.notifications.scalars.log(name, value, weight)

    def run_part(self, part: float) -> None:
        """Sets `part`, where a batch is run in micro-batches."""
        self.part = part

    @property
    def current_samples(self) -> int:
        """Samples of the current batch that count for this rank, 0 outside the loop."""
        return 0 if self._source is None else self._source.current_samples

    @property
    def current_weight(self) -> float:
        """Weight of the current batch in means: its samples, or ``weight_of``."""
        return 0.0 if self._source is None else self._source.current_weight

    def windows(self) -> list[WindowMetrics]:
        """Windows that have ended since the last call; for any thread."""
        taken: list[WindowMetrics] = []
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                taken.append(self.notifications.window_metrics.popleft())
        return taken

    def epoch(self, epoch: int | None, timeout_s: float | None) -> EpochMetrics:
        """Waits for an epoch's metrics; None returns those of the last epoch.

        Raises:
            ConfigError: the training thread would wait for itself, or the epoch is
                forgotten.
            CommunicationError: the run ended before the epoch did.
            DeadlineError: the epoch did not end within ``timeout_s``.
        """
        what = "an epoch" if epoch is None else f"epoch {epoch}"
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_training = threading.current_thread() is self._training
        while True:
            is_over = self._ended.is_set() or not self._training.is_alive()
            found = self.find(epoch)
            if found is not None:
                return found
            if is_over:
                raise CommunicationError(f"the run ended before {what} did")
            if is_training:
                raise ConfigError(
                    f"the metrics of {what} are not there yet, and the training "
                    "thread cannot wait for itself; ask inside `for epoch in ...`, "
                    "after the loop over the epoch, or from another thread (a resumed "
                    "run has none of epochs that ended before its checkpoint)"
                )
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise DeadlineError(f"{what} did not end within {timeout_s} s")
            self._ended.wait(POLL_S)

    def end(self) -> None:
        """Releases waiting callers and the model, since the run has ended."""
        self.notifications.on_metrics = None
        self._ended.set()
        self._source = None

    def find(self, epoch: int | None) -> EpochMetrics | None:
        """Metrics of an epoch, of the last one for None; None if it has not ended."""
        kept = list(self.notifications.epoch_metrics)
        for metrics in reversed(kept):
            if epoch in (None, metrics.epoch):
                return metrics
        if epoch is not None and kept and kept[0].epoch > epoch:
            raise ConfigError(
                f"the metrics of epoch {epoch} are forgotten; kept are those of "
                f"epochs {kept[0].epoch} to {kept[-1].epoch}"
            )
        return None
