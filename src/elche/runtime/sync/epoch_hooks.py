"""Parts of a run that an epoch asks, of steps or of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elche.coordination.protocol.messages import CheckRows, Scalars
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.errors import ElcheError
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
        on_error: told about an error that a `break` cannot raise.
        check: called at the end of every window; raises if the run cannot go on.
        scalars: what the user logged since it was last asked; True waits for all.
        parameter_norm: the L2 norm of what is trained; waits for the device.
        left_with: checks of the whole model, and steps of the optimizers so far.
        drain: takes the step that is still under way, with all ranks.
        numbers: whether this rank's own gradients were numbers, in this epoch and
            before.
        schedulers: those that were handed over.
        copies: of the model, that the loop keeps.
        sums: of what is compared between ranks.
    """

    on_error: Callable[[ElcheError], None]
    check: Callable[[], None]
    scalars: Callable[[bool], Scalars]
    parameter_norm: Callable[[], float]
    left_with: Callable[[], tuple[CheckRows, int]]
    drain: Callable[[], None]
    graphs: LiveGraph
    numbers: NonFiniteRecord
    schedulers: FollowedSchedulers
    copies: ModelCopies
    sums: ModelSums
    regrouping: Regrouping
    steps: StepGroups
