"""Outer optimizers: the step along the mean pseudo-gradient of a window.

The drift Δ_r = θ_k − θ_r of a rank is the sum of its local steps, with the sign of a
gradient. ``average`` sets θ_{k+1} = θ_k − mean Δ (plain parameter averaging).
``nesterov`` takes a step of Nesterov momentum along the mean drift, as DiLoCo
(arXiv:2311.08105) does, in torch.optim.SGD's formulation. Our defaults are weaker than
DiLoCo's (0.7, 0.5 instead of 0.7, 0.9), because windows are short
(`docs/decisions.md`, "Outer step"). ``slowmo`` takes a step of heavy-ball momentum
(SlowMo, arXiv:1910.00643): u becomes momentum × u + mean Δ, and θ_{k+1} = θ_k − lr × u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from elche.comm.averaging.window_sync import SyncResult
from elche.coordination.protocol.instructions import Reduce

MOST_ROUNDED = 0.8
"""Largest momentum kept in bfloat16. Rounding holds back a constant drift: by 1 % of it
at 0.8, 3 % at 0.9, 24 % at 0.99.
"""


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Settings of the outer step along a window's mean drift.

    Attributes:
        kind: ``"average"``, ``"nesterov"`` or ``"slowmo"``.
        lr: outer learning rate (SlowMo's alpha); 1 for ``average``.
        momentum: momentum of the step (SlowMo's beta); unused by ``average``.
        part: factor of the mean drift: the fraction of ranks that trained.
    """

    kind: str
    lr: float
    momentum: float
    part: float = 1.0

    @staticmethod
    def of(plan: Reduce) -> OuterStep:
        """Returns the outer step of a reduction plan."""
        part = min(1.0, plan.active_ranks / plan.mean_over)
        return OuterStep(plan.outer, plan.outer_lr, plan.outer_momentum, part)

    def is_own(self, weight: float) -> bool:
        """True if the result equals the parameters of the rank with this weight."""
        return weight == self.part == 1.0 and self.kind == "average"


class OuterOptimizer:
    """Holds the momentum of the outer step for one flat tensor.

    Args:
        base: flat common parameters, updated in place by the steps.

    Attributes:
        momentum: flat momentum; None before the first step that uses one.
    """

    def __init__(self, base: torch.Tensor) -> None:
        self._base = base
        self.momentum: torch.Tensor | None = None

    def dtype_at(self, momentum: float) -> torch.dtype:
        """Dtype of the momentum, the same on all ranks; a loaded one keeps its own.

        Args:
            momentum: momentum of the step that makes it: a float32 base has bfloat16 up
                to `MOST_ROUNDED`.
        """
        if self.momentum is not None:
            return self.momentum.dtype
        is_rounded = self._base.dtype is torch.float32 and momentum <= MOST_ROUNDED
        return torch.bfloat16 if is_rounded else self._base.dtype

    def load_momentum(self, momentum: torch.Tensor | None) -> None:
        """Loads a copy of a saved momentum; None resets it."""
        self.momentum = None
        if momentum is not None:
            self.momentum = momentum.to(self._base.device, copy=True)

    def step(self, start: int, mean_drift: torch.Tensor, rule: OuterStep) -> None:
        """Moves one part of the base from θ_k to θ_{k+1}, in place.

        Args:
            start: start of the part in the base.
            mean_drift: flat weighted mean of the ranks' drifts in that part. It is
                overwritten by the step's direction: the base moves by −lr × direction.
            rule: settings of the step, the same for all parts of one reduction.
        """
        stop = start + mean_drift.numel()
        if rule.part != 1.0:
            mean_drift.mul_(rule.part)
        if rule.kind != "average":
            if self.momentum is None:
                dtype = self.dtype_at(rule.momentum)
                self.momentum = torch.zeros_like(self._base, dtype=dtype)
            kept = self.momentum[start:stop]
            momentum = kept.to(mean_drift.dtype)
            torch.add(mean_drift, momentum, alpha=rule.momentum, out=momentum)
            kept.copy_(momentum)
            if rule.kind == "slowmo":
                mean_drift.copy_(momentum)
            else:
                mean_drift.add_(momentum, alpha=rule.momentum)
        self._base[start:stop].sub_(mean_drift, alpha=rule.lr)


@dataclass(slots=True)
class ConsensusSums:
    """Sums of squares over the parameters, for the consensus distance.

    Attributes:
        distance: Σ (θ_r − θ̄)².
        size: Σ θ_{k+1}².
    """

    distance: float = 0.0
    size: float = 0.0

    def result(self, weight: float) -> SyncResult:
        """Returns the result for a rank that contributed with this weight."""
        norm = math.sqrt(self.size) if self.size >= 0 else math.nan
        if not math.isfinite(self.distance) or not math.isfinite(norm):
            return SyncResult(math.nan, norm)
        if weight == 0.0 or self.distance == 0.0:
            return SyncResult(0.0, norm)
        if norm == 0.0:
            return SyncResult(math.inf, norm)
        return SyncResult(math.sqrt(self.distance) / norm, norm)
