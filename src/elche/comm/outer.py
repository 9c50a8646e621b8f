"""Outer optimizers: from the mean drift of a window to the next common parameters.

The drift Δ_r = θ_k − θ_r of a rank is what its local steps added, with the sign of a
gradient. ``average`` takes θ_{k+1} = θ_k − mean Δ (plain parameter averaging).
``nesterov`` takes a step of Nesterov momentum along the mean drift, as DiLoCo
(arXiv:2311.08105) does, with torch.optim.SGD's formulation; our defaults are weaker
than DiLoCo's (0.7, 0.5 against 0.7, 0.9), because windows are short
(`docs/decisions.md`, "outer step").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elche.coordination.messages import Reduce
from elche.errors import ProtocolError

KINDS = ("average", "nesterov")


@dataclass(frozen=True, slots=True)
class OuterStep:
    """How a window's mean drift moves the common parameters.

    Attributes:
        kind: ``"average"`` or ``"nesterov"``.
        lr: outer learning rate; 1 for ``average``.
        momentum: momentum of the Nesterov step.

    Raises:
        ProtocolError: there is no such kind, or its rate is another.
    """

    kind: str
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ProtocolError(
                f"expected one of the outer optimizers {KINDS}, got {self.kind!r}"
            )
        if self.kind == "average" and self.lr != 1.0:
            raise ProtocolError(
                f"plain averaging has outer rate 1, got {self.lr!r}; expected kind "
                "'nesterov' for another"
            )

    @staticmethod
    def of(plan: Reduce) -> OuterStep:
        """The step that a reduction asks for."""
        return OuterStep(plan.outer, plan.outer_lr, plan.outer_momentum)


class OuterOptimizer:
    """Holds the momentum of the outer step for one flat tensor.

    Args:
        base: the common parameters, flat, which the steps move.
    """

    def __init__(self, base: torch.Tensor) -> None:
        self._base = base
        self._momentum: torch.Tensor | None = None

    def step(self, start: int, mean_drift: torch.Tensor, rule: OuterStep) -> None:
        """Moves one part of the base from θ_k to θ_{k+1}, in place.

        Args:
            start: where in the base the part begins.
            mean_drift: weighted mean of the ranks' drifts there, flat; becomes the
                step's direction: the base has moved by −lr × it.
            rule: the step; the same for all parts of one reduction.
        """
        stop = start + mean_drift.numel()
        if rule.kind == "nesterov":
            if self._momentum is None:
                self._momentum = torch.zeros_like(self._base)
            momentum = self._momentum[start:stop]
            torch.add(mean_drift, momentum, alpha=rule.momentum, out=momentum)
            mean_drift.add_(momentum, alpha=rule.momentum)
        self._base[start:stop].sub_(mean_drift, alpha=rule.lr)
