"""Time of a rank's batch as a function of its samples, with its spread. Pure.

This is the only estimator of a rank's speed. The balancer, El Che, exclusion, ``auto``
and its predictions use it; the simulator runs the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from elche.errors import ConfigError

MIN_ALPHA = 0.1
"""Weight of a new measurement that agrees with the estimate (jitter)."""
FIRST_ALPHA = 0.5
"""Weight of a new measurement at first, which fades as the noise becomes known."""
NEW = 0.7
"""Part of the noise that is unknown, above which a shorter step replaces the estimate:
the first steps after the warm-up are still 5 to 40 % too long.
"""
MAX_ALPHA = 0.8
"""Weight of a new measurement that is far from the estimate (a real change)."""
SHAPES: tuple[tuple[float, float], ...] = (
    (0.0, 0.0),
    *((2.0**power, 0.0) for power in range(-1, 17)),
    *((0.0, 2.0**power) for power in range(2, 11)),
)
"""Candidate (fixed cost, knee) in samples: lines, and devices saturated from the knee
on. A combination of both cannot be distinguished from either.
"""
MOST_FIXED = 9.0
"""Largest fixed cost that is accepted, in samples of the largest observed step."""
CLEAR = 3.5
"""Evidence that rules out a shape, as a difference of log likelihoods."""
KNEE_PENALTY = 3.5
"""Evidence that a knee needs beyond that of any line."""
MOST_EVIDENCE = 20.0
"""Cap on the evidence for a shape, so that a change of shape is detected."""
FADING = 0.998
"""Decay of older evidence at each report, so that a rejected shape is tried again."""
TEMPER = 0.25
"""Factor on a squared deviation; 0.5 would be right if steps were independent."""
MOST_DEVIATIONS = 4.0
"""Most standard deviations that one step counts as evidence."""
USUAL_NOISE = 0.2
"""Assumed relative standard deviation of a step's time before any is measured."""
LEAST_NOISE = 0.01
"""Lower bound of the relative standard deviation."""
NOISE_WEIGHT = 0.15
"""Weight of a new step in the noise."""
RECENT_STEPS = 3
"""Number of latest steps of which only the median cost counts, to ignore spikes."""
MAX_RISE = 4.0
"""Largest factor by which a single measurement may exceed the estimate."""
SETTLED = 0.1
"""Relative error of a prediction above which a rank's speed counts as changing."""
JUMP = 0.3
"""Relative error above which the estimate is replaced by the new speed. A first step
that takes longer than the next one by more than this was part of the warm-up.
"""
SPREAD = 1.25
"""Least ratio of two batch sizes by which a fixed cost can be estimated."""
LIKE_SIZE = 0.20
"""Relative difference of sizes up to which two steps can be compared."""


@final
class RankTime:
    """Time of a batch: ``cost * (fixed_samples + max(samples, knee_samples))``.

    The shape and the level are learned apart, since a slowdown scales both. The shape
    is either ``fixed_samples`` (the fixed part, counted in samples) or ``knee_samples``
    (a smaller batch takes as long as one of these). The level is ``cost``, the time per
    sample. It follows every measurement by an error-adaptive average: ``alpha =
    clamp(|new - old| / old, 0.1, 0.8)``, so jitter is nearly ignored and a changed
    speed is followed within two or three measurements. A spike must not count in full:
    of timed steps, only the median cost of the last three of similar size counts. So a
    changed speed is noticed one step later, and then replaces a level that is far off.
    The first steps, often longer, are replaced faster by later ones. With ``recent=1``
    (a window's mean, or its last batch) each measurement counts, and a rise is limited
    instead.

    A batch of another size is predicted well by some shapes and badly by others: that
    is the evidence. Batches of one size, or a changed speed, give no evidence, and
    earlier evidence stays. The shape changes only on clear evidence; at first, time is
    proportional. Levels and evidence of all shapes are kept only from the second size.

    Any units of work and of time are valid if they do not change.

    Args:
        recent: number of measurements of which the median cost counts.

    Attributes:
        is_warm: the warm-up is over: a step was not much shorter than the last one.
        is_settled: the last batch took about as long as predicted.
        last_samples: samples of the last batch; 0 before any measurement.
    """

    __slots__ = (
        "_against",
        "_largest",
        "_levels",
        "_most_recent",
        "_noise",
        "_recent",
        "_shape",
        "_smallest",
        "_untold",
        "is_settled",
        "is_warm",
        "last_samples",
    )

    def __init__(self, recent: int = RECENT_STEPS) -> None:
        self._most_recent = recent
        self.forget()

    def forget(self) -> None:
        """Discards all measurements: the rank may have any speed."""
        self._levels = [0.0]
        self._against = [0.0]
        self._shape = 0
        self.last_samples = self._smallest = self._largest = 0
        self._noise = USUAL_NOISE
        self._untold = 1.0
        self._recent: list[tuple[int, float]] = []
        self.is_settled = False
        self.is_warm = self._most_recent == 1

    @property
    def is_measured(self) -> bool:
        """True if there is an estimate."""
        return self._levels[0] > 0.0

    @property
    def cost(self) -> float:
        """Time per sample beyond the fixed part; 0.0 before any measurement."""
        return self._levels[self._shape]

    @property
    def fixed_samples(self) -> float:
        """Fixed part of a batch, in samples that take as long; at least 0."""
        return SHAPES[self._shape][0]

    @property
    def knee_samples(self) -> float:
        """Largest batch, in samples, that takes the least time; 0 if time is linear."""
        return SHAPES[self._shape][1]

    @property
    def spread(self) -> float:
        """Relative standard deviation of a batch's time; 0.0 before two measurements.

        The rest of the assumed initial noise is subtracted.
        """
        told = max(0.0, self._noise**2 - self._untold * USUAL_NOISE**2)
        return math.sqrt(told / (1.0 - self._untold)) if self._untold < 1.0 else 0.0

    @property
    def has_sizes(self) -> bool:
        """True if the sizes of batches differ enough to estimate the fixed part."""
        return self._largest >= SPREAD * self._smallest > 0

    def line(self, ranks: Sequence[RankTime] = ()) -> tuple[float, float]:
        """Returns a batch's fixed time and time per sample, by the likeliest line.

        It changes sooner than the shape for predictions, which needs clear evidence.

        Args:
            ranks: ranks whose evidence counts as well: devices have about equal fixed
                parts, in samples or in seconds, unless this rank's evidence clearly
                differs.
        """
        others = [
            (each._against, [(each._fixed_s(i), each._against[i]) for i in each._lines])
            for each in ranks
            if each is not self
        ]

        def against(index: int) -> float:
            fixed_s = self._fixed_s(index)
            in_samples = sum(known[index] for known, _ in others)
            in_seconds = sum(
                min([(abs(s - fixed_s), known) for s, known in lines])[1]
                for _, lines in others
            )
            return self._against[index] + min(in_samples, in_seconds)

        best = min(self._lines, key=self._against.__getitem__)
        common = min(self._lines, key=against)
        if self._against[common] > self._against[best] + CLEAR:
            common = best
        return self._fixed_s(common), self._levels[common]

    @property
    def _lines(self) -> list[int]:
        return [i for i in self._believed(math.inf) if not SHAPES[i][1]]

    def _fixed_s(self, index: int) -> float:
        return self._levels[index] * SHAPES[index][0]

    def of(self, samples: float) -> float:
        """Returns the expected time of a batch of ``samples``."""
        return self.cost * _load(SHAPES[self._shape], samples)

    def saved(self, samples: float, part: float) -> float:
        """Returns the time that a batch saves without ``part`` of a measured one.

        Where the part exceeds the known fixed time, it was attributed to samples.
        """
        last, knee = max(1, self.last_samples), self.knee_samples
        part = min(part, self.of(last) / 2.0)  # times scatter
        beyond = max(0.0, part - self.cost * self.fixed_samples)
        return part + beyond * (max(samples, knee) / max(last, knee) - 1.0)

    def most_samples(self, samples: int, factor: float) -> float:
        """Returns the most samples of a batch that takes ``factor`` times as long.

        Args:
            samples: samples of an observed batch.
            factor: factor by which the larger batch may take longer.
        """
        self._split_levels()
        shapes = [SHAPES[index] for index in self._believed(CLEAR)]
        return max(_load(shape, samples) * factor - shape[0] for shape in shapes)

    def observe(self, samples: int, busy: float) -> None:
        """Records one batch, or the mean of several equal batches.

        Args:
            samples: samples of the batch, at least 1.
            busy: delivered time, without the wait for others; positive and finite.

        Raises:
            ConfigError: the time is zero, negative or not finite.
        """
        if not (math.isfinite(busy) and busy > 0.0):
            raise ConfigError(f"a time must be positive and finite, got {busy!r}")
        if not self.is_warm and self.last_samples:
            self._leave_warm_up(samples, busy)
        if self._most_recent > 1:
            samples, busy = self._typical(samples, busy)
        elif self.last_samples:
            busy = min(busy, MAX_RISE * self.of(samples))
        if samples != self.last_samples and self.last_samples:
            self._split_levels()
        self.last_samples = samples
        self._largest = max(self._largest, samples)
        self._smallest = min(self._smallest or samples, samples)
        if not self._levels[0]:
            self._levels = [busy / samples]
            return
        shapes = SHAPES[: len(self._levels)]
        costs = [busy / _load(shape, samples) for shape in shapes]
        ratios = [new / old for new, old in zip(costs, self._levels, strict=True)]
        # All levels are updated, however badly their shapes have predicted.
        error, jumps = abs(ratios[self._shape] - 1.0), False
        if self._most_recent > 1:
            is_known = len(self._recent) == self._most_recent
            self.is_settled = is_known and error <= max(SETTLED, 2.0 * self._noise)
            jumps = error > max(JUMP, MOST_DEVIATIONS * self._noise)
            jumps |= self._untold > NEW and ratios[self._shape] < 1.0
        self._judge([abs(math.log(ratio)) for ratio in ratios])
        if jumps:
            self._levels = costs
            return
        least = MIN_ALPHA
        if self._most_recent > 1:
            least = max(least, FIRST_ALPHA * self._untold)
        weight = min(max(error, least), MAX_ALPHA)
        for index, ratio in enumerate(ratios):
            self._levels[index] *= 1.0 + weight * (ratio - 1.0)

    def _leave_warm_up(self, samples: int, busy: float) -> None:
        """Forgets earlier batches if this one takes much less time than they predict.

        Warm-up takes about as long on all ranks, so unequal ranks look equal.
        """
        likely = self.of(self.last_samples) * min(1.0, samples / self.last_samples)
        if busy <= (1.0 - JUMP) * likely:
            self.forget()
        else:
            self.is_warm = True

    def _split_levels(self) -> None:
        """Tracks all shapes from now on; for a single size they are all equal."""
        if len(self._levels) > 1:
            return
        busy = self._levels[0] * self.last_samples
        self._levels = [busy / _load(shape, self.last_samples) for shape in SHAPES]
        self._against = [0.0] * len(SHAPES)

    def _judge(self, errors: Sequence[float]) -> None:
        """Updates the evidence against each shape by its error for a batch."""
        most = MOST_DEVIATIONS * self._noise
        if len(errors) == 1:
            self._note(errors[0], most)
            return
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
            for against, (_, knee) in zip(self._against, SHAPES, strict=False)
        ]
        best = min(believed, key=weighed.__getitem__)
        if weighed[self._shape] > weighed[best] + CLEAR:
            self._shape = best
        self._note(errors[best], most)

    def _note(self, error: float, most: float) -> None:
        """Updates the estimated noise by an error, limited to ``most``."""
        squared = (1.0 - NOISE_WEIGHT) * self._noise**2
        squared += NOISE_WEIGHT * min(error, most) ** 2
        self._noise = max(LEAST_NOISE, math.sqrt(squared))
        self._untold *= 1.0 - NOISE_WEIGHT

    def _believed(self, evidence: float) -> list[int]:
        """Returns possible shapes with less evidence against them than ``evidence``.

        A knee needs larger batches: below it no cost per sample shows.
        """
        most = MOST_FIXED * self._largest
        return [
            index
            for index, ((fixed, knee), against) in enumerate(
                zip(SHAPES, self._against, strict=False)
            )
            if (fixed <= most and knee < self._largest)
            and (against < evidence or index == self._shape)
        ]

    def _typical(self, samples: int, busy: float) -> tuple[int, float]:
        """Returns the batch of median cost among the last ones of similar size."""
        self._recent = [*self._recent, (samples, busy)][-self._most_recent :]
        alike = [s for s in self._recent if abs(s[0] - samples) <= LIKE_SIZE * samples]
        shape = SHAPES[self._shape]
        alike.sort(key=lambda step: step[1] / _load(shape, step[0]))
        return alike[(len(alike) - 1) // 2]


class RankTimes(dict[int, RankTime]):
    """`RankTime` of each rank of a run: seconds as a function of samples.

    All scheduling shares them, so windows begin with the times measured in steps. The
    first access to a rank creates its `RankTime`, without a measurement.

    Args:
        recent: as for each `RankTime`.
    """

    def __init__(self, recent: int = RECENT_STEPS) -> None:
        super().__init__()
        self._most_recent = recent

    def __missing__(self, rank: int) -> RankTime:
        return self.setdefault(rank, RankTime(self._most_recent))


def _load(shape: tuple[float, float], samples: float) -> float:
    """Returns the time of a batch, in samples."""
    fixed, knee = shape
    return fixed + (samples if samples > knee else knee)
