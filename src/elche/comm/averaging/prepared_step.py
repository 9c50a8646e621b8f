"""An outer step computed ahead of its adoption, beside the training thread.

When a sum has come, most of what adopting it takes can be done without the parameters:
the mean, how far this rank is from it, and what is to be added. So another thread does
that, and the training thread's part is one addition to the parameters. Until then
nothing is written that a reduction done again would need: the common parameters and the
outer momentum are moved after the adoption (:meth:`PreparedStep.take`), with the
operations of a step that is not prepared, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.tensors.flat import FlatImage, Segment


@final
class PreparedStep:
    """One outer step of some flat parameters, for one sum.

    Args:
        segments: in which parts it is worked out.
        outer: the outer optimizer.
        rule: the step.
        base: the common parameters θ_k.
        drift: this rank's drift from them.
        added: memory for what is to be added to the parameters.
        scratch: memory for two segments.

    Attributes:
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
        added: FlatImage,
        scratch: tuple[FlatImage, FlatImage],
    ) -> None:
        self._segments = segments
        self._outer = outer
        self._rule = rule
        self._base = base
        self._drift = drift
        self._added = added
        self._scratch = scratch
        self._mean_drift: torch.Tensor | None = None
        self.distance = self.size = 0.0

    @torch.no_grad()
    def work_out(self, summed: torch.Tensor) -> None:
        """Finds what is to be added: this rank's drift less the outer step.

        Args:
            summed: weighted drifts of all ranks, and after them their weight; the mean
                drift is formed in it, and needed until the step has been taken.
        """
        scale = scale_of(float(summed[-1]))
        rule, one, other = self._rule, *self._scratch
        for index, segment in enumerate(self._segments):
            mean = summed[segment.start : segment.stop]
            if scale != 1.0:
                mean.mul_(scale)
            drift, spare = self._drift.parts[index], one.parts[index]
            torch.sub(drift, mean, out=spare)
            self.distance += float(torch.vdot(spare, spare))
            step = self._outer.direction(segment.start, mean, rule, other.parts[index])
            torch.sub(self._base.parts[index], step, alpha=rule.lr, out=spare)
            self.size += float(torch.vdot(spare, spare))
            torch.sub(drift, step, alpha=rule.lr, out=self._added.parts[index])
        self._mean_drift = summed

    @torch.no_grad()
    def take(self) -> None:
        """The sum is adopted: the common parameters become θ_{k+1}."""
        mean_drift, self._mean_drift = self._mean_drift, None
        assert mean_drift is not None
        for segment in self._segments:
            part = mean_drift[segment.start : segment.stop]
            self._outer.step(segment.start, part, self._rule)


def scale_of(weights: float) -> float:
    """What a sum is multiplied by for the mean: one over the weights' sum."""
    return 1.0 / weights if weights > 0.0 else 1.0
