"""Consensus distance, accumulated during a reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result of a synchronisation on this rank.

    Attributes:
        divergence: ‖θ_r − θ̄‖ / ‖θ_{k+1}‖ over the trained parameters; 0.0 if the rank
            contributed nothing, NaN if its parameters or the mean are not finite.
        parameter_norm: ‖θ_{k+1}‖; None if not measured.
    """

    divergence: float
    parameter_norm: float | None


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
