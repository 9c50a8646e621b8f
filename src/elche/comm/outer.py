"""Outer optimizers: from the mean drift of a window to the next common parameters.

The drift Δ_r = θ_k − θ_r of a rank is what its local steps added, with the sign of a
gradient. ``average`` takes θ_{k+1} = θ_k − mean Δ (plain parameter averaging).
``nesterov`` takes a step of Nesterov momentum along the mean drift, as DiLoCo
(arXiv:2311.08105) does, with torch.optim.SGD's formulation; our defaults are weaker
than DiLoCo's (0.7, 0.5 against 0.7, 0.9), because windows are short
(`docs/decisions.md`, "outer step").
"""

from __future__ import annotations

import torch


class OuterOptimizer:
    """Holds the momentum of the outer step for one flat tensor."""

    def __init__(self) -> None:
        self._momentum: torch.Tensor | None = None

    def step(
        self,
        base: torch.Tensor,
        mean_drift: torch.Tensor,
        *,
        kind: str,
        lr: float,
        momentum: float,
    ) -> None:
        """Moves ``base`` from θ_k to θ_{k+1}, in place; ``mean_drift`` is used up.

        Args:
            base: θ_k, flat.
            mean_drift: weighted mean of the ranks' drifts, same shape.
            kind: ``"average"`` or ``"nesterov"``.
            lr: outer learning rate (``average`` uses 1).
            momentum: momentum of the Nesterov step.
        """
        if kind == "average":
            base.sub_(mean_drift)
            return
        if self._momentum is None:
            self._momentum = mean_drift.clone()
        else:
            self._momentum.mul_(momentum).add_(mean_drift)
        mean_drift.add_(self._momentum, alpha=momentum)
        base.sub_(mean_drift, alpha=lr)
