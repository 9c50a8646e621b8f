"""The active run of this process, at most one, and its end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import ClassVar, TypeVar

from elche.by_hand.manual_run import ManualRun
from elche.cadence.call_shares import CallShares
from elche.checkpoint.keeper import CheckpointKeeper
from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.errors import ConfigError, ElcheError
from elche.runtime.emulation import EmulationHandle
from elche.runtime.memory_limits import memory_hint
from elche.runtime.process.environment import Placement, read_placement
from elche.runtime.process.shutdown import (
    counted_hint,
    exit_watch,
    failure_of,
    watch_process,
)
from elche.runtime.process.worker import Worker
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.report.run_summary import RunFacts
from elche.runtime.report.timeline import Timeline
from elche.runtime.report.trackers import TrackedMetrics, Tracker
from elche.runtime.run import Run
from elche.runtime.single import SingleRun

_Value = TypeVar("_Value")
logger = logging.getLogger(__name__)


class Process:
    """Active run of this process, and its parts."""

    run: Run | SingleRun | None = None
    manual: ManualRun | None = None
    """Run of `elche.init_group`."""
    shares = CallShares(0, 1)
    """Splits of `elche.share`."""
    weighs_gradients = False
    """True once `elche.Replica` or `elche.DistributedDataParallel` wraps a model."""
    metrics: MetricsView | None = None
    timeline: Timeline | None = None
    facts: RunFacts | None = None
    trackers: ClassVar[list[Tracker]] = []

    emulation: EmulationHandle | None = None
    placement: Placement | None = None
    checkpoints = CheckpointKeeper()
    training: threading.Thread | None = None
    """Training thread of a `TrainingHandle`, if there is one."""
    evaluation_speeds: tuple[float, ...] = ()
    """Samples per second of each rank in the last evaluation."""
    hooked = False
    place: int | None = None
    """Position of this rank among the survivors when the run ended."""

    def begin(self, run: Run | SingleRun, facts: RunFacts, timeline: Timeline) -> None:
        """Makes a run the active one of this process."""
        self.run, self.metrics = run, MetricsView(run)
        self.timeline, self.facts = timeline, facts
        tracked = TrackedMetrics(self.trackers, run.steps_at)

        def track(metrics: EpochMetrics | WindowMetrics) -> None:
            if run.rank == 0:  # now: the former first rank may be dead
                tracked.take(metrics)

        run.notifications.on_metrics = track

    def end(self) -> None:
        """Ends the active run: keeps its metrics, and releases its model."""
        if self.metrics is not None:
            self.metrics.end()

    def placed(self) -> Placement:
        """Rank and device of this process, also where no run is active."""
        return read_placement() if self.placement is None else self.placement

    def trains_beside(self) -> bool:
        """True if a thread other than this one trains."""
        thread = self.training
        return (
            thread is not None
            and thread.is_alive()
            and thread is not threading.current_thread()
        )


process = Process()


def needed(value: _Value | None, call: str) -> _Value:
    """Returns a value that the first `elche.setup` has set.

    Raises:
        ConfigError: it is not set; names the call that needs it.
    """
    if value is None:
        raise ConfigError(f"elche.{call}() needs a run: call elche.setup first")
    return value


def current_run() -> Run | None:
    """The active run on several ranks, None on one."""
    return process.run if isinstance(process.run, Run) else None


def shutdown() -> None:
    """Ends the run of this process: leaves, and closes group and channel.

    Called at the exit of the interpreter and by the next `setup`. Ends the group of
    `elche.init_group` too.

    Raises:
        ConfigError: a `TrainingHandle`'s thread trains.
    """
    refuse_beside()
    process.shares = CallShares(0, 1)
    _end_manual_run()
    run, process.run = process.run, None
    try:
        process.checkpoints.end_run(has_failed=run is None)
        if run is not None:
            if run.rank != process.placed().rank:
                process.place = run.rank
            run.leave()
    finally:
        emulation, process.emulation = process.emulation, None
        if emulation is not None:
            emulation.remove()
        process.end()
        process.placement = None


def refuse_beside() -> None:
    """Refuses another run beside one in a thread.

    Raises:
        ConfigError: a `TrainingHandle`'s thread trains.
    """
    if process.trains_beside():
        raise ConfigError(
            "a Trainer trains in a thread of this process, one run at a time; call "
            "its handle's join() or stop() first"
        )


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Reports an exception that leaves the block to the other ranks."""
    try:
        yield
    except BaseException as error:
        _report_failure(error)
        raise


def write_line(line: str) -> None:
    """Writes a line to stderr regardless of logging configuration."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def write_on_first(worker: Worker, line: str) -> None:
    """Writes a line for the user on the first living rank; others log it."""
    if worker.place == 0:
        write_line(line)
    else:
        logger.info(line)


def watch_exit() -> None:
    """Leaves the run at exit, and reports an uncaught exception to the other ranks."""
    if process.hooked:
        return
    process.hooked = True
    exit_watch.attach()
    watch_process(_report_failure, shutdown)


def _end_manual_run(error: BaseException | None = None) -> None:
    """Leaves the run of `elche.init_group`, and reports the error, if any."""
    manual, process.manual = process.manual, None
    if manual is not None:
        manual.end(error)


def _report_failure(error: BaseException) -> None:
    with contextlib.suppress(ElcheError):
        _end_manual_run(error)
    run = current_run()
    if process.trains_beside():  # that thread ends later, and closes all
        if run is not None:
            with contextlib.suppress(ElcheError):
                run.worker.send(failure_of(run.worker.rank, error))
        return
    process.end()
    if run is None:
        return
    process.run = None
    hint = memory_hint(error, run.worker.rank, run.last_samples)
    hint = hint or counted_hint(error, run.policy)
    if hint:
        write_line(f"elche: {hint}")
    with contextlib.suppress(ElcheError):
        run.close(failure_of(run.worker.rank, error, hint))
