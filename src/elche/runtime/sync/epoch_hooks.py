"""Parts of a run that an epoch asks, of steps or of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elche.comm.gradients.reducer import GradientReducer
from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.instructions import LeaveOut
from elche.coordination.protocol.messages import CheckRows, Scalars
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.errors import ElcheError
from elche.runtime.sync.step_regrouping import StepRegrouping
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.model_sums import ModelSums
from elche.runtime.windows.regrouping import Regrouping


@dataclass(frozen=True, slots=True)
class EpochHooks:
    """Callbacks of an epoch to its run.

    Attributes:
        on_error: told about an error that a `break` cannot raise.
        check: called at the end of every window; raises if the run cannot go on.
        scalars: what the user logged since it was last asked; True waits for all.
        parameter_norm: the L2 norm of what is trained; waits for the device.
        graphs: whose backward pass has not come.
        numbers: whether this rank's own gradients were numbers, in this epoch and
            before.
        adopt: takes model and optimizers of one rank, with all ranks.
        schedulers: those that were handed over.
        copies: of the model, that the loop keeps.
        leave_out: shares steps among others from now on; returns what reduces them.
        unknown: names state of this rank that cannot be carried to another, or "".
        left_with: checks of the whole model, and steps of the optimizers so far.
        sums: of what is compared between ranks.
        drain: takes the step that is still under way, with all ranks.
        regrouping: forms the next group where ranks have died.
        steps: the same under ``sync``.
    """

    on_error: Callable[[ElcheError], None]
    check: Callable[[], None]
    scalars: Callable[[bool], Scalars]
    parameter_norm: Callable[[], float]
    graphs: LiveGraph
    numbers: NonFiniteRecord = field(default_factory=NonFiniteRecord)
    adopt: Callable[[int], None] | None = None
    schedulers: FollowedSchedulers = field(
        default_factory=lambda: FollowedSchedulers("sync", float, StepCount())
    )
    copies: ModelCopies | None = None
    leave_out: Callable[[LeaveOut], GradientReducer] | None = None
    unknown: Callable[[], str] = str
    left_with: Callable[[], tuple[CheckRows, int]] = lambda: ((), 0)
    sums: ModelSums = field(default_factory=lambda: ModelSums(()))
    drain: Callable[[], None] = lambda: None
    regrouping: Regrouping | None = None
    steps: StepRegrouping | None = None
