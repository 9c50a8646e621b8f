"""Outer optimizers: the step along the mean pseudo-gradient of a window.

The drift Δ_r = θ_k − θ_r of a rank is what its local steps added, with the sign of a
gradient. ``average`` takes θ_{k+1} = θ_k − mean Δ (plain parameter averaging).
``nesterov`` takes a step of Nesterov momentum along the mean drift, as DiLoCo
(arXiv:2311.08105) does, with torch.optim.SGD's formulation; our defaults are weaker
than DiLoCo's (0.7, 0.5 against 0.7, 0.9), because windows are short
(`docs/decisions.md`, "Outer step"). ``slowmo`` takes a step of heavy-ball momentum
along it (SlowMo, arXiv:1910.00643): u becomes momentum × u + mean Δ, and θ_{k+1} =
θ_k − lr × u. The paper divides Δ by the rate of the local steps, and multiplies the
outer step by it again. While that rate is constant it is the same; under a schedule
ours keeps what earlier windows moved as they moved it, where the paper's would rescale
it by the rate now over the rate then. That would need a rate that all ranks agree on,
for little: momentum forgets faster than a schedule moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elche.coordination.protocol.instructions import Reduce


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outer optimizer: it moves the common parameters by a window's mean drift.

    Attributes:
        kind: ``"average"``, ``"nesterov"`` or ``"slowmo"``.
        lr: outer learning rate (SlowMo's alpha); 1 for ``average``.
        momentum: momentum of the step (SlowMo's beta); ``average`` has none.
        part: the mean drift is scaled by it: the part of the ranks that trained.
    """

    kind: str
    lr: float
    momentum: float
    part: float = 1.0

    @staticmethod
    def of(plan: Reduce) -> OuterStep:
        """The step that a reduction asks for."""
        part = min(1.0, plan.active_ranks / plan.mean_over)
        return OuterStep(plan.outer, plan.outer_lr, plan.outer_momentum, part)

    def is_own(self, weight: float) -> bool:
        """True if the result is what the rank of this weight holds."""
        return weight == self.part == 1.0 and self.kind == "average"


class OuterOptimizer:
    """Holds the momentum of the outer step for one flat tensor.

    Args:
        base: the common parameters, flat, which the steps move.

    Attributes:
        momentum: flat; None before the first step that has one.
    """

    def __init__(self, base: torch.Tensor) -> None:
        self._base = base
        self.momentum: torch.Tensor | None = None

    def load_momentum(self, momentum: torch.Tensor | None) -> None:
        """Goes on from a saved momentum, which is copied; None forgets it."""
        self.momentum = None
        if momentum is not None:
            self.momentum = torch.empty_like(self._base).copy_(momentum)

    def step(self, start: int, mean_drift: torch.Tensor, rule: OuterStep) -> None:
        """Moves one part of the base from θ_k to θ_{k+1}, in place.

        Args:
            start: where in the base the part begins.
            mean_drift: weighted mean of the ranks' drifts there, flat; becomes the
                step's direction: the base has moved by −lr × it.
            rule: the step; the same for all parts of one reduction.
        """
        stop = start + mean_drift.numel()
        if rule.part != 1.0:
            mean_drift.mul_(rule.part)
        if rule.kind != "average":
            if self.momentum is None:
                self.momentum = torch.zeros_like(self._base)
            momentum = self.momentum[start:stop]
            torch.add(mean_drift, momentum, alpha=rule.momentum, out=momentum)
            if rule.kind == "slowmo":
                mean_drift.copy_(momentum)
            else:
                mean_drift.add_(momentum, alpha=rule.momentum)
        self._base[start:stop].sub_(mean_drift, alpha=rule.lr)
