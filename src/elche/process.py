"""The active run of this process, at most one."""

from __future__ import annotations

import threading
from typing import ClassVar

from elche.checkpoint.keeper import CheckpointKeeper
from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.runtime.emulation import EmulationHandle
from elche.runtime.process.environment import Placement
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.report.run_summary import RunFacts
from elche.runtime.report.timeline import Timeline
from elche.runtime.report.trackers import TrackedMetrics, Tracker
from elche.runtime.run import Run
from elche.runtime.single import SingleRun


class Process:
    """What this process has under way."""

    run: Run | SingleRun | None = None
    metrics: MetricsView | None = None
    timeline: Timeline | None = None
    notifications: RunNotifications | None = None
    facts: RunFacts | None = None
    trackers: ClassVar[list[Tracker]] = []

    emulation: EmulationHandle | None = None
    placement: Placement | None = None
    checkpoints = CheckpointKeeper()
    training: threading.Thread | None = None
    """Trains with a `TrainingHandle`, if any does."""
    hooked = False
    has_bar = False
    place: int | None = None
    """Where ranks have died: this one's among the others, when the run had ended."""

    def begin(self, run: Run | SingleRun, facts: RunFacts, timeline: Timeline) -> None:
        """Takes the run that this process has under way from now on."""
        self.run, self.metrics = run, MetricsView(run)
        self.timeline, self.facts = timeline, facts
        self.notifications = run.notifications
        tracked = TrackedMetrics(self.trackers, run.steps_at)

        def track(metrics: EpochMetrics | WindowMetrics) -> None:
            if run.rank == 0:  # now: who was the first may have died
                tracked.take(metrics)

        run.notifications.on_metrics = track

    def end(self) -> None:
        """The run has ended: its metrics are kept, and its model may be forgotten."""
        if self.metrics is not None:
            self.metrics.end()
        if self.notifications is not None:
            self.notifications.on_metrics = None

    def trains_beside(self) -> bool:
        """Whether another thread than this one trains."""
        thread = self.training
        return (
            thread is not None
            and thread.is_alive()
            and thread is not threading.current_thread()
        )


process = Process()
