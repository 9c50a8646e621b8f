"""Callbacks of a run for its epochs, of steps or of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elche.coordination.protocol.messages import CheckRows
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.errors import ElcheError
from elche.runtime.sync.step_groups import StepGroups
from elche.runtime.watch.model_sums import ModelSums
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.regrouping import Regrouping


@dataclass(frozen=True, slots=True)
class EpochHooks:
    """Callbacks of an epoch to its run.

    Attributes:
        on_error: receives an error that a `break` cannot raise.
        check: called at the end of every window; raises if the run cannot continue.
        parameter_norm: returns the trained parameters' L2 norm; waits for the device.
        left_with: returns checks of the whole model, and optimizer steps so far.
        observer: observer of the user's loop.
        numbers: record of this rank's non-finite gradients, in this epoch and before.
        sums: checksums that are compared between ranks.
    """

    on_error: Callable[[ElcheError], None]
    check: Callable[[], None]
    parameter_norm: Callable[[], float]
    left_with: Callable[[], tuple[CheckRows, int]]
    observer: LoopObserver
    numbers: NonFiniteRecord
    sums: ModelSums
    regrouping: Regrouping
    steps: StepGroups
