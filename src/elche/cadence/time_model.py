"""What a step costs a rank in dependence of its number of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from elche.cadence.throughput import (
    MAX_SPEED_RATIO,
    CostEstimate,
    check_int,
    check_measure,
)
from elche.errors import ConfigError

FORGETTING = 0.95
"""Weight that an observation keeps in the fit when the next one comes."""
MIN_OBSERVATIONS = 6.0
"""Weight of observations below which nothing is fitted."""
MIN_SPREAD = 0.10
"""Standard deviation of the samples, relative to their mean, needed for a fit."""
MAX_SLOPE_ERROR = 0.10
"""Standard error of the fitted slope, relative to it, that is still believed."""
MAX_FIXED_SHARE = 0.90
"""Largest part of an average step that may count as fixed cost."""
RECENT_STEPS = 3
"""Steps of which only the one of median cost is taken in: a spike is none."""
LIKE_SIZE = 0.20
"""Relative difference of sizes up to which two steps can be compared."""
NEW_SPEED = 0.30
"""A prediction error at a familiar size that means another speed, not noise."""


@final
class TimeModel:
    """Time of a step of n samples: ``cost_s * (fixed_samples + n)``.

    The shape (``fixed_samples``: the fixed cost, counted in samples) and the
    level (``cost_s``: seconds per sample) are learned apart. The level follows
    every report by the error-adaptive average. The shape comes from least
    squares with exponential forgetting and changes only while the sizes vary
    enough to show it, else the last one stays; at first it is 0, proportional.
    Of the last three steps of about one size only that of median cost counts: a
    straggler moves nothing, and a changed speed is noticed one report later. Such
    a change rescales what the fit remembers, so that times from before and after
    it are not mixed into a false slope.
    """

    __slots__ = ("_cost", "_fixed_samples", "_recent", "_sums")

    def __init__(self) -> None:
        self._cost = CostEstimate()
        self._fixed_samples = 0.0
        self._recent: list[tuple[int, float]] = []
        self._sums = [0.0] * 6

    @property
    def cost(self) -> CostEstimate:
        """Seconds per sample beyond the fixed cost."""
        return self._cost

    @property
    def fixed_samples(self) -> float:
        """Fixed cost of a step, in samples that take as long; at least 0."""
        return self._fixed_samples

    def predict_s(self, samples: int) -> float:
        """Seconds that a step of so many samples takes; 0.0 before any report."""
        return self._cost.value * (self._fixed_samples + samples)

    def observe(self, samples: int, busy_s: float) -> None:
        """Takes in one step.

        Args:
            samples: samples of the step, at least 1.
            busy_s: its delivered seconds without waiting for others, positive.
        """
        samples, busy_s = self._typical(samples, busy_s)
        self._remember(samples, busy_s)
        fitted = self._fitted_fixed_samples()
        if fitted is not None:
            mean = self._sums[1] / self._sums[0]
            if self._cost.is_measured:
                self._cost.rescale((self._fixed_samples + mean) / (fitted + mean))
            self._fixed_samples = fitted
        self._cost.observe(busy_s / (self._fixed_samples + samples))

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as values that JSON keeps exactly."""
        return {
            "cost_s": self._cost.value,
            "fixed_samples": self._fixed_samples,
            "recent": [list(step) for step in self._recent],
            "sums": list(self._sums),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TimeModel:
        """Makes what ``state_dict`` described.

        Raises:
            ConfigError: the state holds impossible values.
            KeyError: the state lacks something.
        """
        model = cls()
        model._cost = CostEstimate(state["cost_s"])
        model._fixed_samples = check_measure("fixed_samples", state["fixed_samples"])
        sums = [check_measure("a sum", value) for value in state["sums"]]
        if len(sums) != len(model._sums):
            raise ConfigError(
                f"a time model's state holds {len(model._sums)} sums, got {len(sums)}"
            )
        model._sums = sums
        model._recent = [
            (check_int("samples", samples, 1), check_measure("busy_s", busy_s))
            for samples, busy_s in state["recent"]
        ]
        return model

    def _typical(self, samples: int, busy_s: float) -> tuple[int, float]:
        """The step of median cost among the last ones of about this size."""
        self._recent = [*self._recent, (samples, busy_s)][-RECENT_STEPS:]
        alike = [s for s in self._recent if abs(s[0] - samples) <= LIKE_SIZE * samples]
        alike.sort(key=lambda step: step[1] / (self._fixed_samples + step[0]))
        return alike[(len(alike) - 1) // 2]

    def _remember(self, samples: int, busy_s: float) -> None:
        weight, n, t, nn, nt, tt = self._sums
        predicted_s = self.predict_s(samples)
        if predicted_s > 0.0:
            factor = busy_s / predicted_s
            familiar = abs(samples * weight - n) <= LIKE_SIZE * n
            if not 1.0 / MAX_SPEED_RATIO < factor < MAX_SPEED_RATIO:
                weight = n = t = nn = nt = tt = 0.0
            elif familiar and abs(factor - 1.0) > NEW_SPEED:
                t, nt, tt = t * factor, nt * factor, tt * factor * factor
        added = (1.0, samples, busy_s, samples**2, samples * busy_s, busy_s**2)
        kept = (weight, n, t, nn, nt, tt)
        self._sums = [FORGETTING * a + b for a, b in zip(kept, added, strict=True)]

    def _fitted_fixed_samples(self) -> float | None:
        """The fixed cost that the least squares show, None if they do not."""
        weight, n, t, nn, nt, tt = self._sums
        mean_n, mean_t = n / weight, t / weight
        variance = nn / weight - mean_n**2
        if weight < MIN_OBSERVATIONS or variance < (MIN_SPREAD * mean_n) ** 2:
            return None
        slope = (nt / weight - mean_n * mean_t) / variance
        if slope <= 0.0:
            return None
        spread = max(0.0, tt / weight - mean_t**2 - slope**2 * variance)
        error = math.sqrt(spread / variance / (weight - 2.0))
        if error > MAX_SLOPE_ERROR * slope:
            return None
        largest = mean_n * MAX_FIXED_SHARE / (1.0 - MAX_FIXED_SHARE)
        return min(max(0.0, mean_t / slope - mean_n), largest)
