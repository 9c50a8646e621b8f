"""The handle of a training that runs in a thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import final

from elche.coordination.accounts.metrics import WindowMetrics
from elche.errors import AbortedError, ConfigError, DeadlineError, ElcheError
from elche.runtime.process.shutdown import failure_of
from elche.runtime.process.stop_signals import SignalStops, StopRequest
from elche.runtime.report.metrics_view import MetricsView
from elche.session.process import current_run, process, refuse_beside
from elche.trainer.trainer_result import TrainResult

logger = logging.getLogger(__name__)


class TrainingPhase(Enum):
    """Phase of a training.

    ::

        TRAINING ── stop(), a signal ──► STOPPING ──► FINISHED
            │  └──────── last epoch ─────────────────────┘
            └── abort(), an error, here or on another rank ──► FAILED
    """

    TRAINING = "training"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


@final
class TrainingHandle:
    """A training in progress in a thread of this process; made by `Trainer.start`.

    Its methods may be called from any other thread. During training, SIGINT (Ctrl-C)
    and SIGTERM act on it if the handle was made in the main thread and the script has
    no
    handlers of its own: the first is a `stop`, the second an `abort`.

    Args:
        fit: trains, and polls the stop request; its further arguments are whether
            signals are handled, and a callback for the run's metrics.

    Attributes:
        error: exception that ended the training, or None.
    """

    def __init__(
        self,
        fit: Callable[[StopRequest, bool, Callable[[MetricsView], None]], TrainResult],
    ) -> None:
        self._fit = fit
        self._request = StopRequest()
        self._signals = SignalStops(self._request, self.abort)
        self._thread = threading.Thread(target=self._run, name="elche-training")
        self._heeds = False
        self._view: MetricsView | None = None
        self._result: TrainResult | None = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Starts the training; called by `Trainer.start`.

        Raises:
            ConfigError: another Trainer is training in this process.
        """
        refuse_beside()
        process.training = self._thread
        self._heeds = self._signals.open()
        self._thread.start()

    def poll(self) -> TrainingPhase:
        """Returns the current phase without waiting."""
        if not self._thread.is_alive():
            is_done = self._result is not None
            return TrainingPhase.FINISHED if is_done else TrainingPhase.FAILED
        is_asked = bool(self._request.reason) or self._request.is_aborted
        return TrainingPhase.STOPPING if is_asked else TrainingPhase.TRAINING

    def metrics(self) -> list[WindowMetrics]:
        """Metrics of windows that have ended since the last call."""
        return [] if self._view is None else self._view.windows()

    def stop(self, timeout_s: float | None = None) -> TrainResult:
        """Ends the training on all ranks, and returns the result so far.

        It ends after the current batch. Everything granted to ranks by then is
        committed, and with ``checkpoint_dir`` a last checkpoint is made. Call it on
        every rank, or on only one. A rank excluded by `sync` receives the request only
        at the epoch's end; rank 0 is never excluded.

        Args:
            timeout_s: most seconds to wait; None waits as long as the run's own
                deadlines allow.

        Raises:
            DeadlineError: the training had not ended by then; it is still ending.
            ElcheError: as `Trainer.fit`.
        """
        self._request.stop("stop")
        return self.join(timeout_s)

    def abort(self) -> None:
        """Ends the training at once, on all ranks, without a result; does not wait.

        `join` then raises AbortedError here and RemoteRankError on other ranks.
        """
        if not self._thread.is_alive() or self._request.is_aborted:
            return
        self._request.is_aborted = True
        run = current_run()
        if run is not None:  # also ends the waits of this rank
            error = AbortedError("the training was aborted")
            with contextlib.suppress(ElcheError):
                run.worker.send(failure_of(run.worker.rank, error))

    def join(self, timeout_s: float | None = None) -> TrainResult:
        """Waits for the end and returns the result.

        Raises:
            DeadlineError: the training takes longer than ``timeout_s``; it continues.
            AbortedError: `abort` was called here.
            ConfigError: the training thread (a callback) would wait for itself.
            ElcheError: as `Trainer.fit`; also any exception of a callback, the loss
                function or the data set.
        """
        if threading.current_thread() is self._thread:
            raise ConfigError(
                "a callback runs in the training thread, which cannot wait for its own "
                "end; wait in another thread, or raise to end the run"
            )
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the training had not ended after {timeout_s:g} s")
        if threading.current_thread() is threading.main_thread():
            self._signals.close()
        if self._result is None:
            assert self.error is not None
            raise self.error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._fit(self._request, self._heeds, self._take_view)
        except BaseException as error:
            self.error = error
            if self._request.is_aborted and not isinstance(error, AbortedError):
                self.error = AbortedError("the training was aborted")
                self.error.__cause__ = error
            logger.error("the training has failed: %r; join() raises it", self.error)
        finally:
            self._request.is_over = True

    def _take_view(self, view: MetricsView) -> None:
        self._view = view
