"""Costs of one rank's steps, fixed and per sample, from few steps that jitter. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SPREAD = 1.25
"""Steps whose sizes differ by this factor tell fixed seconds from those per sample."""
LEAST_SPREAD = 0.25
"""And by this part of an equal share."""
ALIKE = 0.5
"""Relative deviation from what would be alike on all ranks that shows another rank."""
SURE_STEPS = 4
CLEARLY = 9.0
"""Of so many steps, and a fit of its own that much better, less shows it, too."""
LARGEST_FIXED, FIXED_RATIO, FIXED_TRIED = 1e5, 1.25, 80
"""Fixed parts tried, from so many times the largest step down by this ratio."""
LEAST_S = 1e-9


@dataclass(slots=True)
class RankCosts:
    """One rank: what its steps cost by size, and how that has changed since.

    Attributes:
        sample_s: seconds per sample.
        fixed_s: of a step beside its samples.
        factor: how much longer work takes now than when these were learned.
        steps: grants that were measured, as samples and seconds of a step, and steps.
        spent_s: since :meth:`follow` was called last, and ...
        expected_s: ... what that work was expected to take.
        equal: samples of an equal part of a step.
    """

    sample_s: float = 0.0
    fixed_s: float = 0.0
    factor: float = 1.0
    steps: list[tuple[int, float, int]] = field(default_factory=list)
    spent_s: float = 0.0
    expected_s: float = 0.0
    equal: float = 0.0

    def step_s(self, samples: float) -> float:
        """Expected when the costs were learned."""
        return self.fixed_s + samples * self.sample_s

    @property
    def has_spread(self) -> bool:
        """Whether steps of sizes were run that differ enough to tell, in any jitter."""
        sizes = [samples for samples, _, _ in self.steps]
        more = (SPREAD - 1.0) * min(sizes, default=0)
        least = max(more, LEAST_SPREAD * self.equal)
        return bool(sizes) and max(sizes) - min(sizes) >= least

    def learn(self) -> None:
        """Fits both costs by least squares of relative errors.

        So one slow step (compilation, a spike) weighs little. Without steps of
        different sizes all of a step counts as that of its samples.
        """
        if not self.steps:
            return
        weights = [steps / step_s**2 for _, step_s, steps in self.steps]
        total = sum(weights)
        parts = [weight / total for weight in weights]
        samples = sum(w * s[0] for w, s in zip(parts, self.steps, strict=True))
        step_s = sum(w * s[1] for w, s in zip(parts, self.steps, strict=True))
        self.sample_s, self.fixed_s = step_s / samples, 0.0
        if self.has_spread:
            pairs = [
                (w, n - samples, s)
                for w, (n, s, _) in zip(parts, self.steps, strict=True)
            ]
            slope_s = sum(w * more * s for w, more, s in pairs)
            slope_s /= sum(w * more * more for w, more, _ in pairs)
            slope_s = min(max(slope_s, LEAST_S * step_s), self.sample_s)
            # Rounding must not leave less than nothing.
            self.sample_s, self.fixed_s = slope_s, max(0.0, step_s - samples * slope_s)
        self.factor = 1.0

    def assume(self, fixed_samples: float) -> None:
        """So many samples' time of each step is fixed, as on other ranks.

        Unless steps of this rank show that it is not: few that jitter show nothing.
        """
        if not self.steps:
            return
        misfit = self.misfit(fixed_samples)
        is_other = misfit > 2.0 * ALIKE**2
        if len(self.steps) >= SURE_STEPS:
            is_other |= misfit > CLEARLY * self.misfit(self.fixed_s / self.sample_s)
        if self.has_spread and is_other:
            return
        costs = [step_s / (fixed_samples + n) for n, step_s, _ in self.steps]
        self.sample_s = median(costs)
        self.fixed_s = fixed_samples * self.sample_s

    def misfit(self, fixed_samples: float) -> float:
        """Of its steps, were so many samples' time of each of them fixed."""
        logs = [math.log(step_s / (fixed_samples + n)) for n, step_s, _ in self.steps]
        middle = sum(logs) / len(logs)
        return sum((each - middle) ** 2 for each in logs)

    def deviations(self) -> list[float]:
        """Of single steps from what steps of their size take, relative to that."""
        return [
            abs(step_s / self.step_s(samples) - 1.0) * math.sqrt(steps)
            for samples, step_s, steps in self.steps
        ]

    def follow(self) -> None:
        """Takes in how much longer work has taken since than it was expected to."""
        if self.expected_s > 0.0 and self.spent_s > 0.0:
            self.factor = self.spent_s / self.expected_s
        self.spent_s = self.expected_s = 0.0


def common_fixed_samples(ranks: Sequence[RankCosts]) -> float | None:
    """Samples in whose time a step's fixed part would be run, alike on all ranks.

    The number that explains best, in relative terms, the steps of all who have run
    several sizes; None where nobody has.
    """
    known = [costs for costs in ranks if costs.has_spread]
    if not known:
        return None
    most = LARGEST_FIXED * max(n for costs in known for n, _, _ in costs.steps)
    tried = (most / FIXED_RATIO**power for power in range(FIXED_TRIED))
    return min((0.0, *tried), key=lambda fixed: sum(c.misfit(fixed) for c in known))
