"""Time of a rank's batch: its level, its fixed part, and its spread."""

from __future__ import annotations

import math
import random

import pytest

from elche.cadence.rank_time import RankTime
from elche.errors import ConfigError


def test_varied_steps_show_the_fixed_cost() -> None:
    model = RankTime()
    for samples in (32, 16, 24, 8) * 10:
        model.observe(samples, 0.1 + 0.01 * samples)
    assert model.fixed_samples == 8.0  # 10 is between the shapes 8 and 16
    assert model.of(64) == pytest.approx(0.74, rel=0.06)


def test_steps_of_one_size_keep_what_was_learned() -> None:
    model = RankTime()
    for samples in (32, 16, 24, 8) * 5 + (32,) * 200:
        model.observe(samples, 0.1 + 0.01 * samples)
    assert model.fixed_samples == 8.0
    for _ in range(30):  # three times slower: the shape stays, the level follows
        model.observe(32, 3 * 0.42)
    assert model.fixed_samples == 8.0
    assert model.of(16) == pytest.approx(3 * 0.26, rel=0.05)


def test_noise_is_hardly_ever_taken_for_a_fixed_cost() -> None:
    def shows_one(seed: int) -> bool:
        rng, model, found = random.Random(seed), RankTime(), False
        for _ in range(60):
            samples = rng.choice((28, 36))
            model.observe(samples, 0.01 * samples * rng.uniform(0.6, 1.4))
            found |= model.fixed_samples > 0.0
        return found

    assert sum(map(shows_one, range(100))) <= 10


def test_larger_steps_in_less_time_show_no_more_than_a_large_fixed_cost() -> None:
    model = RankTime()
    for samples in (32, 16) * 10:
        model.observe(samples, 10.0 / samples)
    assert model.fixed_samples <= 9 * 32
    assert 10.0 / 32 <= model.of(24) <= 10.0 / 16


@pytest.mark.parametrize("seed", range(10))
def test_a_step_of_one_sample_takes_no_fixed_cost_for_slowness(seed: int) -> None:
    """Throttled tenfold it comes down to one sample; released, 32 are predicted right.

    8 ms and 0.15 ms per sample: of one sample, nearly all is fixed.
    """
    rng = random.Random(seed)
    model = RankTime()
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
    assert model.of(32) == pytest.approx(0.0128, rel=0.3)


def test_evidence_fades_so_that_a_larger_step_is_hoped_for_again() -> None:
    model = RankTime()
    for samples in (32, 1) * 5:
        model.observe(samples, 0.01 * samples)
    known = model.most_samples(1, 2.0)
    assert known == pytest.approx(2.0, abs=0.7)  # twice the time for twice as many
    for _ in range(2000):
        model.observe(1, 0.01)
    assert model.most_samples(1, 2.0) > 100.0
    assert model.fixed_samples == 0.0


@pytest.mark.parametrize("factor", [0.3, 2.0, 3.0, 10.0])
def test_a_change_of_speed_is_followed_within_two_batches(factor: float) -> None:
    model = RankTime()
    for _ in range(20):
        model.observe(16, 0.1)
    for _ in range(2):
        model.observe(16, factor * 0.1)
    assert model.of(16) == pytest.approx(factor * 0.1)


def test_a_batch_that_hangs_moves_nothing() -> None:
    model = RankTime()
    for busy in (0.1,) * 10 + (60.0,) + (0.1,) * 3:
        model.observe(1, busy)
        assert model.of(1) == pytest.approx(0.1)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_jitter_is_averaged_and_its_spread_is_known(noise: float) -> None:
    rng = random.Random(3)
    model = RankTime()
    for _ in range(200):
        model.observe(8, 0.1 * rng.gauss(1.0, noise))
    assert model.of(8) == pytest.approx(0.1, rel=0.5 * noise)
    assert 0.3 * noise < model.spread < 1.2 * noise


@pytest.mark.parametrize("busy", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_refused(busy: float) -> None:
    model = RankTime()
    model.observe(1, 2.0)
    with pytest.raises(ConfigError, match="positive and finite"):
        model.observe(1, busy)
    assert model.cost == 2.0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (10.0, 10.0, 10.0),  # no error, least weight
        (10.0, 10.5, 10.05),  # 5 % error: weight 0.1
        (10.0, 11.0, 10.1),  # 10 %: 0.1
        (10.0, 15.0, 12.5),  # 50 %: 0.5
        (10.0, 5.0, 7.5),
        (10.0, 20.0, 18.0),  # 100 %: 0.8
        (10.0, 1.0, 2.8),
        (10.0, 100.0, 34.0),  # no more than fourfold
    ],
)
def test_where_each_measurement_counts_its_weight_follows_the_reference(
    old: float, new: float, expected: float
) -> None:
    estimate = RankTime(recent=1)
    assert not estimate.is_measured
    estimate.observe(1, old)
    assert estimate.cost == old
    estimate.observe(1, new)
    assert estimate.cost == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
def test_the_likeliest_line_is_found_in_four_steps(seed: int) -> None:
    """Of half a batch and nearly all of it, in turn; 5 % of jitter."""
    rng = random.Random(seed)
    model = RankTime()
    assert not model.has_sizes
    for samples in (16, 31, 16, 31):
        model.observe(samples, (0.016 + 0.001 * samples) * rng.gauss(1.0, 0.05))
    assert model.has_sizes
    fixed_s, cost_s = model.line()
    assert fixed_s + 32 * cost_s == pytest.approx(0.048, rel=0.15)
