"""An outer step computed ahead of its adoption, beside the training thread.

When a sum has come, most of what adopting it takes can be done without the parameters:
the mean, how far this rank is from it, and what is to be added. So another thread does
that, and the training thread's part is one addition to the parameters. What is to be
added takes the drift's place: a sum that is here is adopted, because all ranks adopt
what one of them has. The common parameters and the outer momentum are moved after the
adoption (:meth:`PreparedStep.take`), with the operations of a step that is not
prepared, so that all ranks get the same bits; the mean is read a second time for that,
which costs time of the other thread instead of memory for a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch

from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.codec.background_exchange import SumReader
from elche.comm.tensors.flat import FlatImage, Segment


@final
class PreparedStep:
    """One outer step of some flat parameters, for one sum.

    Args:
        segments: in which parts it is worked out.
        outer: the outer optimizer.
        rule: the step.
        base: the common parameters θ_k.
        drift: this rank's drift from them; then what is to be added to the parameters.
        scratch: memory for two segments.

    Attributes:
        is_worked_out: the drift is that no more.
        distance: Σ (θ_r − θ̄)², once worked out.
        size: Σ θ_{k+1}².
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        outer: OuterOptimizer,
        rule: OuterStep,
        *,
        base: FlatImage,
        drift: FlatImage,
        scratch: tuple[FlatImage, FlatImage],
    ) -> None:
        self._segments = segments
        self._outer = outer
        self._rule = rule
        self._base = base
        self._drift = drift
        self._scratch = scratch
        self._sum_into: SumReader | None = None
        self.is_worked_out = False
        self.distance = self.size = 0.0

    @torch.no_grad()
    def work_out(self, sum_into: SumReader) -> None:
        """Finds what is to be added: this rank's drift less the outer step.

        Args:
            sum_into: reads weighted drifts of all ranks, and after them their weight;
                needed until the step has been taken.
        """
        self._sum_into, self.is_worked_out = sum_into, True
        rule = self._rule
        for index, mean in self._means():
            start = self._segments[index].start
            drift, spare = self._drift.parts[index], self._scratch[1].parts[index]
            torch.sub(drift, mean, out=spare)
            self.distance += float(torch.vdot(spare, spare))
            step = self._outer.direction(start, mean, rule, spare)
            free = spare if step is mean else mean
            drift.sub_(step, alpha=rule.lr)
            torch.sub(self._base.parts[index], step, alpha=rule.lr, out=free)
            self.size += float(torch.vdot(free, free))

    @torch.no_grad()
    def take(self) -> None:
        """The sum is adopted: the common parameters become θ_{k+1}."""
        for index, mean in self._means():
            self._outer.step(self._segments[index].start, mean, self._rule)
        self._sum_into = None

    def _means(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The mean drift of each segment in turn, all in the same memory."""
        sum_into = self._sum_into
        assert sum_into is not None
        numel = self._base.flat.numel()
        weights = torch.zeros(1, dtype=torch.float32, device="cpu")
        sum_into(numel, numel + 1, weights)
        scale = scale_of(float(weights[0]))
        for index, segment in enumerate(self._segments):
            mean = self._scratch[0].parts[index]
            sum_into(segment.start, segment.stop, mean)
            if scale != 1.0:
                mean.mul_(scale)
            yield index, mean


def scale_of(weights: float) -> float:
    """What a sum is multiplied by for the mean: one over the weights' sum."""
    return 1.0 / weights if weights > 0.0 else 1.0
