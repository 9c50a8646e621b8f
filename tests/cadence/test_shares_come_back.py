"""Shares of a rank that was slowed down for a while, and what trials of others cost."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.balancer import Balancer
from elche.cadence.split import split_for_makespan

BACK_STEPS = 400
"""Within so many steps after its release a rank has its share again."""


@dataclass
class Fleet:
    """Ranks in a closed loop with a balancer: split, run, report.

    A step is run by the split of ``lag`` steps before, as loaders draw ahead.
    """

    batch: int
    cost_s: Sequence[float]
    fixed_s: Sequence[float]
    noise: float
    lag: int
    seed: int
    trials: int = 0
    steps: int = 0
    drawn: deque[tuple[int, ...]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.balancer = Balancer(len(self.cost_s))
        self.random = random.Random(self.seed)

    def times_s(self, sizes: Sequence[int], slow: Sequence[float]) -> list[float]:
        ranks = zip(sizes, self.fixed_s, self.cost_s, slow, strict=True)
        return [(fixed + cost * n) * factor for n, fixed, cost, factor in ranks]

    def step(self, slow: Sequence[float]) -> tuple[int, ...]:
        while len(self.drawn) < self.lag:
            self.drawn.append(self.balancer.sizes(self.batch))
        tried = self.balancer.trial(self.batch, self.steps)
        self.steps = self.steps + 1 if tried is None else -self.lag
        self.trials += tried is not None
        self.drawn.append(tried or self.balancer.sizes(self.batch))
        sizes = self.drawn.popleft()
        assert sum(sizes) == self.batch
        assert min(sizes) >= 1
        noises = (max(0.3, self.random.gauss(1.0, self.noise)) for _ in sizes)
        took = zip(self.times_s(sizes, slow), noises, strict=True)
        self.balancer.report(sizes, [time * noise for time, noise in took])
        return sizes

    def run(self, steps: int, slow: Sequence[float]) -> list[float]:
        """How long each step takes, but for its noise."""
        return [max(self.times_s(self.step(slow), slow)) for _ in range(steps)]

    @property
    def best_s(self) -> float:
        fixed = [f / c for f, c in zip(self.fixed_s, self.cost_s, strict=True)]
        sizes = split_for_makespan(self.batch, self.cost_s, fixed, 1)
        return max(self.times_s(sizes, [1.0] * len(sizes)))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    size = draw(st.integers(2, 8))
    batch = size * draw(st.sampled_from((1, 2, 4, 8, 32, 128)))
    slowest = draw(st.sampled_from((1.0, 4.0)))
    cost = [draw(st.floats(1.0, slowest)) for _ in range(size)]
    fixed = draw(st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, 4.0))) * batch / size
    return Fleet(
        batch,
        cost,
        [c * fixed * draw(st.floats(0.5, 2.0)) for c in cost],
        draw(st.sampled_from((0.0, 0.03, 0.1, 0.2))),
        draw(st.sampled_from((0, 3))),
        draw(st.integers(0, 2**32)),
    )


@given(fleets(), st.integers(0, 7), st.sampled_from((2.0, 4.0, 10.0, 50.0)))
@settings(max_examples=20, deadline=None)
def test_a_rank_that_was_throttled_gets_its_share_back(
    fleet: Fleet, slowed: int, factor: float
) -> None:
    usual = [1.0] * len(fleet.cost_s)
    slow = [
        factor if rank == slowed % len(usual) else 1.0 for rank in range(len(usual))
    ]
    before_s = fmean(fleet.run(120, usual)[-40:])
    fleet.run(120, slow)
    taken_s = fleet.run(BACK_STEPS, usual)
    best_s = min(fmean(taken_s[i : i + 20]) for i in range(BACK_STEPS - 19))
    assert best_s <= 1.05 * before_s


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_that_was_slow_from_the_first_step_gets_its_share(size: int) -> None:
    """Nothing of it was seen but one sample, and shares by the hint."""
    fleet = Fleet(16 * size, [1.0] * size, [24.0] * size, 0.05, 3, 1)
    hints = [1.0] * (size - 1) + [0.001]
    fleet.balancer = Balancer(size, speed_hints=hints)
    slow = [1.0] * (size - 1) + [20.0]
    fleet.run(200, slow)
    assert fleet.step(slow)[-1] == 1
    fleet.run(600, [1.0] * size)
    assert fmean(fleet.run(20, [1.0] * size)) <= 1.05 * fleet.best_s


def test_a_trial_costs_little_of_the_steps_since_the_last() -> None:
    """One sample took 40 instead of 63, so more may take 40 each, if none is fixed."""

    def trial(steps: int) -> tuple[int, ...] | None:
        ranks = Balancer(2)
        for _ in range(3):
            ranks.report([63, 1], [63.0, 40.0])
        assert ranks.sizes(64) == (63, 1)
        return ranks.trial(64, steps)

    tried = {steps: trial(steps) for steps in (0, 31, 32, 70, 100, 10_000)}
    assert list(tried.values()) == [None, None, (62, 2), (61, 3), (60, 4), (60, 4)]
    for steps, sizes in tried.items():
        assert sizes is None or 40 * sizes[1] <= 63 * (1.0 + 0.02 * steps)


def test_a_trial_keeps_to_caps_and_to_the_least_parts_of_others() -> None:
    ranks = Balancer(2, max_samples=(None, 1))
    for _ in range(3):
        ranks.report([63, 1], [63.0, 40.0])
    assert ranks.trial(64, 10_000) is None
    few = Balancer(2)
    few.report([1, 1], [1.0, 0.1])
    assert few.trial(2, 10_000) is None


def test_who_was_never_measured_is_not_tried() -> None:
    # Once: batches too small for parts of all, which go to another rank than before.
    ranks = Balancer(2, min_share_samples=2, speed_hints=[1.0, 2.0])
    ranks.report([3, 0], [3.0, 0.0])
    assert ranks.sizes(3) == (0, 3)
    assert ranks.trial(3, 10_000) is None


def test_a_rank_that_idles_is_given_more_whatever_little_that_gains() -> None:
    """One of eight: a few samples more are below 2 % of the step, and never came."""
    ranks = Balancer(8)
    for _ in range(3):
        ranks.report([1] + [40] * 7, [14.0] + [40.0] * 7)
    assert ranks.sizes(281)[0] in (2, 3)
    for _ in range(20):
        sizes = ranks.sizes(281)
        ranks.report(sizes, [13.5 + 0.5 * sizes[0], *map(float, sizes[1:])])
    assert ranks.sizes(281)[0] >= 20
