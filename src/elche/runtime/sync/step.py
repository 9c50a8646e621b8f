"""A step of ``sync``, as one rank has its part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elche.comm.gradients.part_weights import Lost, StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.runtime.watch.live_graph import LiveGraph


class Step(NamedTuple):
    """This rank's part of one global batch.

    A rank without samples gets some to run its loop body on (the same control flow, the
    same optimizer step), but weighs nothing. ``part`` is what of the step is its own:
    epoch and step, its first sample and one past the last, or (). ``span`` is the part
    of an epoch that it is a step of, among all of the run.
    """

    step: int
    samples: int
    shares: tuple[int, ...]
    part: tuple[int, ...] = ()
    span: int = 0

    def weighed(self, weight: float | None) -> StepPart:
        """This part with the weight of its gradients.

        Args:
            weight: what the user says; None: its samples.
        """
        scale = self.samples / max(1, sum(self.shares))
        active = len(self.shares) - self.shares.count(0)
        return StepPart(scale, active, weight, label=self)

    def among(self, ranks: Sequence[int]) -> Step:
        """The same without the shares of all others."""
        shares = tuple(n if r in ranks else 0 for r, n in enumerate(self.shares))
        return Step(self.step, self.samples, shares, self.part, self.span)

    def lost(self, number: int, *, gone: Mapping[int, int]) -> Lost:
        """Weight missing from a pass of this step.

        Args:
            number: of the pass, in the run.
            gone: ranks whose loop has left, and the passes that each has come to.
        """
        lost = [self.shares[rank] for rank, passes in gone.items() if passes < number]
        ranks, active = (sum(n > 0 for n in each) for each in (lost, self.shares))
        return Lost(sum(lost) / sum(self.shares), ranks / active)

    def is_same(self, other: Step | None) -> bool:
        """True if it is the same global batch."""
        return other is not None and (self.span, self.step) == (other.span, other.step)


def open_steps(reducer: GradientReducer, graphs: LiveGraph) -> list[Step]:
    """Steps whose backward pass is under way, or to come, oldest first."""
    parts = [reducer.part_under_way, *graphs.open_batches]
    if parts == [None]:
        return []
    steps = {part.label for part in parts if isinstance(part, StepPart)}
    found = [step for step in steps if not step.is_same(reducer.passed)]
    return sorted(found, key=lambda step: (step.span, step.step))
