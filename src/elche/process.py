"""The active run of this process, at most one."""

from __future__ import annotations

import threading

from elche.runtime.emulation import EmulationHandle
from elche.runtime.process.environment import Placement
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.run import Run
from elche.runtime.single import SingleRun


class Process:
    """What this process has under way."""

    run: Run | SingleRun | None = None
    metrics: MetricsView | None = None
    emulation: EmulationHandle | None = None
    placement: Placement | None = None
    training: threading.Thread | None = None
    """Trains with a `TrainingHandle`, if any does."""
    hooked = False
    has_bar = False
    barriers = 0

    def trains_beside(self) -> bool:
        """Whether another thread than this one trains."""
        thread = self.training
        return (
            thread is not None
            and thread.is_alive()
            and thread is not threading.current_thread()
        )


process = Process()
