"""NaN/Inf detection under ``sync``, attributed to a rank. Pure.

All ranks take the same step, so parameters that are no numbers are so on all of them,
and nothing says whose gradient it was: after the reduction everybody's is none. Each
rank therefore looks at its own gradients before they are reduced, and says since which
backward pass they have not been numbers, without one in between that was. Under a
GradScaler that happens often and means nothing: the next step's are numbers again. Only
where the parameters are lost is anybody blamed: who was first. A second pass of the
same step adds to the reduced gradients of the first, so that all ranks' are none there:
passes are told apart. So are parameters, for passes may be of other parts of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from elche.coordination.protocol.events import EpochLeft, StepsDone
from elche.coordination.protocol.messages import OwnPart
from elche.errors import NonFiniteError

PATIENCE_REPORTS = 3
"""A rank may find out later than others, whose device is further; not much later."""


@final
class OwnNumbers:
    """What one rank has seen, in the order in which it happened, over all epochs.

    A gradient that an epoch leaves to the first step of the next is the reduced one,
    the same on all ranks, when the next pass adds to it.

    Attributes:
        is_finite: the parameters were numbers when they were last looked at.
    """

    def __init__(self) -> None:
        self.is_finite = True
        self._broken: dict[int, OwnPart] = {}

    @property
    def broken(self) -> OwnPart:
        """Since when its own gradients are no numbers; () if they are."""
        return min(self._broken.values(), default=())

    def gradients(self, part: OwnPart, parameter: int, *, is_finite: bool) -> None:
        """The rank's own gradient of a parameter, in a backward pass.

        Args:
            part: epoch, step, pass, and the samples of the step's batch (first, one
                past the last) that it is of.
            parameter: which one.
            is_finite: it is numbers.
        """
        if is_finite:
            self._broken.pop(parameter, None)
        else:
            self._broken.setdefault(parameter, part)

    def parameters(self, *, is_finite: bool) -> None:
        """The parameters, after a step."""
        self.is_finite = is_finite


@final
class StepNumbers:
    """What ranks have said of their numbers in an epoch."""

    def __init__(self) -> None:
        self._broken: dict[int, OwnPart] = {}
        self._lost: dict[int, int] = {}

    def clear(self) -> None:
        """Begins an epoch, or a generation."""
        self._broken.clear()
        self._lost.clear()

    def take(self, event: StepsDone | EpochLeft) -> None:
        """A rank's report."""
        self._broken[event.rank] = event.broken
        is_lost = not event.is_finite
        self._lost[event.rank] = self._lost.get(event.rank, 0) + 1 if is_lost else 0

    def check(self, epoch: int, members: Iterable[int], *, is_last: bool) -> None:
        """Stops the run if the model is lost.

        Args:
            epoch: the epoch.
            members: who is there, and holds the same parameters.
            is_last: nobody will say more of this epoch.

        Raises:
            NonFiniteError: it is.
        """
        lost = [self._lost.get(rank, 0) for rank in members]
        late = any(lost) and (is_last or max(lost) >= PATIENCE_REPORTS)
        if late or all(lost):
            raise self._error(epoch)

    def _error(self, epoch: int) -> NonFiniteError:
        broken = {rank: part for rank, part in self._broken.items() if part}
        first = min((part[:3] for part in broken.values()), default=())
        ranks = sorted(rank for rank, part in broken.items() if part[:3] == first)
        began, step = first[:2] if first else (epoch, -1)
        where = f"step {step}" if began == epoch else f"step {step} of epoch {began}"
        batches = ((step, step + 1),) if first and began == epoch else ()
        rank = ranks[0] if len(ranks) == 1 else None
        part: OwnPart = ()
        if rank is not None:
            start, stop = broken[rank][3:]
            part = (start, stop) if batches else ()
            who = (
                f"the first gradient that was not finite was rank {rank}'s own, in "
                f"{where}, of samples {start} to {stop - 1} of its batch"
            )
        elif ranks:
            who = (
                f"ranks {ranks} first had gradients that were not finite in the "
                f"same {where}, so the learning rate may be at fault rather than "
                "a sample"
            )
        else:
            who = "no rank has seen a gradient of its own that was not finite"
        return NonFiniteError(
            f"the model's parameters have become NaN in epoch {epoch}; {who}. "
            "A step under sync is one of all ranks, and nothing can be left out of it: "
            "look at the data, the loss and the learning rate, take a GradScaler, or "
            "choose a policy of windows ('cadence', 'async'), where an update that is "
            "not finite is discarded",
            rank,
            batches,
            part,
        )
