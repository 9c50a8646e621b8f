"""Step time of a rank as a function of its number of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from elche.cadence.throughput import (
    CostEstimate,
    adaptive_weight,
)

SHAPES: tuple[tuple[float, float], ...] = (
    (0.0, 0.0),
    *((2.0**power, 0.0) for power in range(-1, 17)),
    *((0.0, 2.0**power) for power in range(2, 11)),
)
"""Fixed costs and knees among which is chosen, counted in samples: lines, and devices
that are full from the knee on. Both at once are not told apart from either.
"""
MOST_FIXED = 9.0
"""Largest fixed cost that is believed, in samples of the largest step that was seen."""
CLEAR = 3.5
"""Evidence against a shape that is believed, as a difference of log likelihoods."""
KNEE_PENALTY = 3.5
"""Evidence that a knee must have beyond any line's."""
MOST_EVIDENCE = 20.0
"""Evidence is kept up to this, so that a shape that has changed is found again."""
FADING = 0.998
"""What a report leaves of older evidence, so that a wrong one is tried again."""
TEMPER = 0.25
"""Of a squared deviation; 0.5 were right if the steps before did not deviate too."""
MOST_DEVIATIONS = 4.0
"""Standard deviations that one step counts at most: its speed may have changed."""
USUAL_NOISE = 0.2
"""Relative standard deviation of a step's time, before any is measured."""
LEAST_NOISE = 0.01
"""Relative standard deviation below which none is believed."""
NOISE_WEIGHT = 0.15
"""Weight of a step in the noise."""
RECENT_STEPS = 3
"""Steps of which only the one of median cost is taken in: a spike is none."""
SETTLED = 0.1
"""Relative error of a prediction from which on a rank's speed is taken to change."""
JUMP = 0.3
"""Relative error from which on a rank's speed has changed and is taken as it is now."""
LIKE_SIZE = 0.20
"""Relative difference of sizes up to which two steps can be compared."""


@final
class TimeModel:
    """Time of a step: ``cost_s * (fixed_samples + max(samples, knee_samples))``.

    The shape (``fixed_samples``: the fixed cost, counted in samples; or
    ``knee_samples``: a smaller step takes as long as one of these) and the level
    (``cost_s``: seconds per sample) are learned apart, since what slows a device down
    scales both. For each of some shapes the level follows every report by the
    error-adaptive average. A step of another size than those before is predicted
    well by some shapes and badly by others: that is the evidence. Steps of one size
    and a changed speed are none, and what was learned before stays. The shape
    changes only where evidence against it is clear; at first it is 0, proportional.
    A level that is far off is taken anew at once, for what lies between would be sizes.
    Of the last three steps of about one size only that of median cost counts: a
    straggler moves nothing, and a changed speed is noticed one report later.
    """

    __slots__ = (
        "_against",
        "_is_settled",
        "_largest",
        "_levels",
        "_noise",
        "_recent",
        "_shape",
    )

    def __init__(self) -> None:
        self._levels = [0.0] * len(SHAPES)
        self._against = [0.0] * len(SHAPES)
        self._shape = 0
        self._largest = 0
        self._noise = USUAL_NOISE
        self._recent: list[tuple[int, float]] = []
        self._is_settled = False

    @property
    def is_settled(self) -> bool:
        """Whether the last step took about what was predicted."""
        return self._is_settled

    @property
    def cost(self) -> CostEstimate:
        """Seconds per sample beyond the fixed cost."""
        return CostEstimate(self._levels[self._shape])

    @property
    def fixed_samples(self) -> float:
        """Fixed cost of a step, in samples that take as long; at least 0."""
        return SHAPES[self._shape][0]

    @property
    def knee_samples(self) -> float:
        """Samples below which a step takes no less time; 0 for a line."""
        return SHAPES[self._shape][1]

    def most_samples(self, samples: int, factor: float) -> float:
        """Of a step that may be done in so many times the time, as far as was shown.

        Args:
            samples: of a step as it was seen.
            factor: by what the larger step may take longer.
        """
        shapes = [SHAPES[index] for index in self._believed(CLEAR)]
        return max(_load(shape, samples) * factor - shape[0] for shape in shapes)

    def observe(self, samples: int, busy_s: float) -> None:
        """Takes in one step.

        Args:
            samples: samples of the step, at least 1.
            busy_s: its delivered seconds without waiting for others, positive.
        """
        samples, busy_s = self._typical(samples, busy_s)
        self._largest = max(self._largest, samples)
        costs = [busy_s / _load(shape, samples) for shape in SHAPES]
        if not self._levels[0]:
            self._levels = costs
            return
        ratios = [new / old for new, old in zip(costs, self._levels, strict=True)]
        # All levels follow alike: not the faster, the worse a shape has predicted.
        error = abs(ratios[self._shape] - 1.0)
        is_known = len(self._recent) == RECENT_STEPS
        self._is_settled = is_known and error <= max(SETTLED, 2.0 * self._noise)
        jumps = error > max(JUMP, MOST_DEVIATIONS * self._noise)
        self._judge([abs(math.log(ratio)) for ratio in ratios])
        if jumps:
            self._levels = costs
            return
        weight = adaptive_weight(error)
        for index, ratio in enumerate(ratios):
            self._levels[index] *= 1.0 + weight * (ratio - 1.0)

    def _judge(self, errors: Sequence[float]) -> None:
        """Weighs the shapes by how well each has predicted a step."""
        most = MOST_DEVIATIONS * self._noise
        scale = TEMPER / self._noise**2
        against = [
            FADING * known + scale * min(error, most) ** 2
            for known, error in zip(self._against, errors, strict=True)
        ]
        least = min(against)
        self._against = [min(each - least, MOST_EVIDENCE) for each in against]
        believed = self._believed(math.inf)
        weighed = [
            against + (KNEE_PENALTY if knee else 0.0)
            for against, (_, knee) in zip(self._against, SHAPES, strict=True)
        ]
        best = min(believed, key=weighed.__getitem__)
        if weighed[self._shape] > weighed[best] + CLEAR:
            self._shape = best
        squared = (1.0 - NOISE_WEIGHT) * self._noise**2
        squared += NOISE_WEIGHT * min(errors[best], most) ** 2
        self._noise = max(LEAST_NOISE, math.sqrt(squared))

    def _believed(self, evidence: float) -> list[int]:
        """Shapes that are possible, with less evidence against them than this.

        A knee is where larger steps were seen: before it no cost shows.
        """
        most = MOST_FIXED * self._largest
        return [
            index
            for index, ((fixed, knee), against) in enumerate(
                zip(SHAPES, self._against, strict=True)
            )
            if (fixed <= most and knee < self._largest)
            and (against < evidence or index == self._shape)
        ]

    def _typical(self, samples: int, busy_s: float) -> tuple[int, float]:
        """The step of median cost among the last ones of about this size."""
        self._recent = [*self._recent, (samples, busy_s)][-RECENT_STEPS:]
        alike = [s for s in self._recent if abs(s[0] - samples) <= LIKE_SIZE * samples]
        shape = SHAPES[self._shape]
        alike.sort(key=lambda step: step[1] / _load(shape, step[0]))
        return alike[(len(alike) - 1) // 2]


def _load(shape: tuple[float, float], samples: int) -> float:
    """A step's time, in samples."""
    fixed, knee = shape
    return fixed + (samples if samples > knee else knee)
