"""Devices that are full from some samples on: learned where steps show it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.balancer import Balancer
from elche.cadence.rank_time import RankTime

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
COST_S = 0.001
Curve = Callable[[int], float]


def learned(curve: Curve, noise: float, seed: int) -> RankTime:
    """After sixty steps of all sizes."""
    rng, model = random.Random(seed), RankTime()
    for _ in range(60):
        samples = rng.choice(SIZES)
        model.observe(samples, curve(samples) * rng.uniform(1 - noise, 1 + noise))
    return model


def predicted(model: RankTime, samples: int) -> float:
    load = model.fixed_samples + max(samples, model.knee_samples)
    return model.cost * load


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_knee_is_learned_from_sizes_on_both_sides(noise: float, seed: int) -> None:
    def curve(samples: int) -> float:
        return COST_S * max(samples, 32)

    model = learned(curve, noise, seed)
    assert (model.fixed_samples, model.knee_samples) == (0.0, 32.0)
    for samples in (1, 24, 48, 512):
        assert predicted(model, samples) == pytest.approx(curve(samples), rel=0.15)


@given(
    fixed=st.floats(0.0, 200.0),
    noise=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 9999),
)
@settings(max_examples=100)
def test_a_line_shows_no_knee(fixed: float, noise: float, seed: int) -> None:
    model = learned(lambda samples: COST_S * (fixed + samples), noise, seed)
    assert model.knee_samples == 0.0


def test_no_knee_is_believed_beyond_the_largest_step() -> None:
    model = RankTime()
    for samples in (4, 1, 2) * 20:
        model.observe(samples, 0.1)
    assert model.knee_samples == 0.0
    assert predicted(model, 3) == pytest.approx(0.1, rel=0.15)


def test_a_balancer_predicts_small_batches_with_the_knee() -> None:
    balancer = Balancer(2)
    for part in SIZES * 5:
        balancer.report((part, part), [COST_S * max(part, 32)] * 2)
    assert balancer.step_s(4, []) == pytest.approx(32 * COST_S, rel=0.1)
    assert balancer.step_s(128, []) == pytest.approx(64 * COST_S, rel=0.1)
    assert balancer.step_s(128, [1]) == pytest.approx(128 * COST_S, rel=0.1)


def test_a_batch_at_the_knee_saves_reductions_once() -> None:
    """Once: by the samples, so that a step took 0.0 s, and the gain had no value."""
    balancer = Balancer(2)
    for part in (*SIZES * 5, 16, 16, 16, 16):
        balancer.report((part, part), [COST_S * max(part, 32)] * 2)
    assert balancer.step_s(32, [1], 0.016) == pytest.approx(0.016, rel=0.1)
