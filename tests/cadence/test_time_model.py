"""The fixed cost of a step: learned where the steps show it, else left alone."""

from __future__ import annotations

import random

import pytest

from elche.cadence.balancer import split_for_makespan
from elche.cadence.time_model import TimeModel


def step_s(model: TimeModel, samples: int) -> float:
    """Seconds that a step of so many samples takes."""
    return model.cost.value * (model.fixed_samples + samples)


def test_before_any_step_nothing_is_predicted() -> None:
    model = TimeModel()
    assert (step_s(model, 32), model.fixed_samples) == (0.0, 0.0)
    model.observe(32, 0.64)
    assert step_s(model, 16) == pytest.approx(0.32)


def test_varied_steps_show_the_fixed_cost() -> None:
    model = TimeModel()
    for samples in (32, 16, 24, 8) * 10:
        model.observe(samples, 0.1 + 0.01 * samples)
    assert model.fixed_samples == 8.0  # 10 is between the shapes 8 and 16
    assert step_s(model, 64) == pytest.approx(0.74, rel=0.06)


def test_steps_of_one_size_keep_what_was_learned() -> None:
    model = TimeModel()
    for samples in (32, 16, 24, 8) * 5 + (32,) * 200:
        model.observe(samples, 0.1 + 0.01 * samples)
    assert model.fixed_samples == 8.0
    for _ in range(30):  # three times slower: the shape stays, the level follows
        model.observe(32, 3 * 0.42)
    assert model.fixed_samples == 8.0
    assert step_s(model, 16) == pytest.approx(3 * 0.26, rel=0.05)


@pytest.mark.parametrize("seed", range(30))
def test_noise_is_not_taken_for_a_fixed_cost(seed: int) -> None:
    rng = random.Random(seed)
    model = TimeModel()
    for _ in range(60):
        samples = rng.choice((28, 36))
        model.observe(samples, 0.01 * samples * rng.uniform(0.6, 1.4))
        assert model.fixed_samples == 0.0


def test_larger_steps_in_less_time_show_no_more_than_a_large_fixed_cost() -> None:
    model = TimeModel()
    for samples in (32, 16) * 10:
        model.observe(samples, 10.0 / samples)
    assert model.fixed_samples <= 9 * 32
    assert 10.0 / 32 <= step_s(model, 24) <= 10.0 / 16


@pytest.mark.parametrize("seed", range(10))
def test_a_step_of_one_sample_takes_no_fixed_cost_for_slowness(seed: int) -> None:
    """Throttled tenfold it comes down to one sample; released, 32 are predicted right.

    8 ms and 0.15 ms per sample: of one sample, nearly all is fixed.
    """
    rng = random.Random(seed)
    model = TimeModel()
    for factor, samples, steps in (
        (1, 32, 30),
        (10, 32, 3),
        (10, 5, 2),
        (10, 1, 50),
        (1, 1, 10),
    ):
        for _ in range(steps):
            busy_s = factor * (0.008 + 0.00015 * samples)
            model.observe(samples, busy_s * rng.uniform(0.9, 1.1))
    assert step_s(model, 32) == pytest.approx(0.0128, rel=0.3)


def test_evidence_fades_so_that_a_larger_step_is_hoped_for_again() -> None:
    model = TimeModel()
    for samples in (32, 1) * 5:
        model.observe(samples, 0.01 * samples)
    known = model.most_samples(1, 2.0)
    assert known == pytest.approx(2.0, abs=0.7)  # twice the time for twice as many
    for _ in range(2000):
        model.observe(1, 0.01)
    assert model.most_samples(1, 2.0) > 100.0
    assert model.fixed_samples == 0.0


def test_a_huge_batch_is_split_without_counting_its_samples() -> None:
    """One sample after the other this would take hours."""
    parts = split_for_makespan(10**11, [1.0, 4.0, 2.0], [1e10, 1e10, 0.0], 1)
    assert sum(parts) == 10**11
    ends = [1.0 * (1e10 + parts[0]), 4.0 * (1e10 + parts[1]), 2.0 * parts[2]]
    assert max(ends) - min(ends) <= 4.0
