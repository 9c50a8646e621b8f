"""Parts of a run that its epochs use, of steps or of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elche.coordination.protocol.messages import CheckRows
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.errors import ElcheError
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.sync.step_groups import StepGroups
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.model_sums import ModelSums
from elche.runtime.windows.regrouping import Regrouping


@dataclass(frozen=True, slots=True)
class EpochHooks:
    """Callbacks of an epoch to its run.

    Attributes:
        on_error: receives an error that a `break` cannot raise.
        check: called at the end of every window; raises if the run cannot continue.
        scalars: log of the loop's scalars.
        parameter_norm: returns the trained parameters' L2 norm; waits for the device.
        left_with: returns checks of the whole model, and optimizer steps so far.
        numbers: record of this rank's non-finite gradients, in this epoch and before.
        schedulers: schedulers that the user has registered.
        copies: the loop's copies of the model.
        sums: checksums that are compared between ranks.
    """

    on_error: Callable[[ElcheError], None]
    check: Callable[[], None]
    scalars: ScalarLog
    parameter_norm: Callable[[], float]
    left_with: Callable[[], tuple[CheckRows, int]]
    graphs: LiveGraph
    numbers: NonFiniteRecord
    schedulers: FollowedSchedulers
    copies: ModelCopies
    sums: ModelSums
    regrouping: Regrouping
    steps: StepGroups
