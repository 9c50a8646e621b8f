"""El Che by tables: what the reference does right, and none of its faults."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from elche.cadence.el_che import ElChe, ElCheConfig
from elche.errors import ConfigError


def el_che(world_size: int = 2, **options: object) -> ElChe:
    return ElChe(ElCheConfig(world_size=world_size, **options))  # type: ignore[arg-type]


def report(che: ElChe, ms: list[float], sync_ms: float = 0.0) -> None:
    """One window as planned, every rank at its milliseconds per batch."""
    counts = che.batch_counts
    wall_ms = [cost * n for cost, n in zip(ms, counts, strict=True)]
    che.report_timing(wall_ms, counts, sync_ms)


def test_the_first_window_is_equal_and_uncalibrated() -> None:
    che = el_che(3, anchor=7)
    assert che.batch_counts == (7, 7, 7)
    assert (che.anchor, che.total_batches, che.world_size) == (7, 21, 3)
    assert che.ms_per_batch == (0.0, 0.0, 0.0)
    assert che.anchor_wall_ms == 0.0
    assert not che.is_calibrated
    assert not che.has_speed_hint
    assert che.enabled


@pytest.mark.parametrize(
    ("ms", "anchor", "counts"),
    [
        ([10.0, 40.0], 10, (40, 10)),
        ([40.0, 10.0], 10, (10, 40)),
        ([10.0, 23.0], 10, (23, 10)),
        ([10.0, 10.0], 10, (10, 10)),
        ([10.0, 25.0], 1, (3, 1)),  # 2.5 rounds up, as in the reference
        ([1.0, 1.5, 2.5, 4.0], 10, (40, 27, 16, 10)),
        ([3.0], 5, (5,)),
    ],
)
def test_counts_fill_the_time_of_the_slowest(
    ms: list[float], anchor: int, counts: tuple[int, ...]
) -> None:
    che = el_che(len(ms), anchor=anchor)
    report(che, ms)
    assert che.batch_counts == counts
    assert che.ms_per_batch == tuple(ms)
    assert che.anchor_wall_ms == anchor * max(ms)
    assert [che.batches(rank) for rank in range(len(ms))] == list(counts)


@pytest.mark.parametrize(
    ("hints", "counts"),
    [
        ({1: 0.4}, (25, 10, 25)),
        ([1.0, 1e-300, 1.0], (10_000_000, 10, 10_000_000)),  # MAX_SPEED_RATIO
        ([1.0, 0.5, 0.25], (40, 20, 10)),
        ([4.0, 2.0, 1.0], (40, 20, 10)),
        ({0: 2.0}, (20, 10, 10)),
        ([1.0, 1.0, 1.0], (10, 10, 10)),
    ],
)
def test_hints_shape_the_first_window_per_rank(
    hints: object, counts: tuple[int, ...]
) -> None:
    che = el_che(3, speed_hints=hints)
    assert che.batch_counts == counts
    assert che.has_speed_hint == (len(set(counts)) > 1)
    assert che.anchor_wall_ms == 0.0
    report(che, [30.0, 10.0, 10.0])
    assert che.batch_counts == (10, 30, 30)


def test_unmeasured_ranks_count_like_the_reference_until_measured() -> None:
    che = el_che(3)
    che.report_timing([100.0, 400.0, 0.0], [10, 10, 0], 0.0)
    assert che.batch_counts == (40, 10, 10)
    che.report_timing([400.0, 400.0, 200.0], [40, 10, 10], 0.0)
    assert che.batch_counts == (40, 10, 20)
    hinted = el_che(2, speed_hints={0: 2.0})
    hinted.report_timing([0.0, 400.0], [0, 10], 0.0)
    assert hinted.batch_counts == (20, 10)


def test_a_rank_without_batches_keeps_its_estimate() -> None:
    che = el_che(2)
    report(che, [10.0, 40.0])
    before = (che.anchor, che.batch_counts, che.ms_per_batch)
    che.report_timing([0.0, 0.0], [0, 0], 50.0)
    che.report_timing([70.0, 0.0], [0, 3], 50.0)
    che.report_timing([1e-300, 0.0], [1, 0], 50.0)
    assert (che.anchor, che.batch_counts, che.ms_per_batch) == before


@pytest.mark.parametrize(
    ("wall_ms", "batches", "sync_ms", "message"),
    [
        ([1.0, math.nan], [1, 1], 0.0, "wall_ms of rank 1"),
        ([-1.0, 1.0], [1, 1], 0.0, "wall_ms of rank 0"),
        ([1.0, math.inf], [1, 0], 0.0, "wall_ms of rank 1"),
        ([1.0, 1.0], [1, -1], 0.0, "actual_batches of rank 1"),
        ([1.0, 1.0], [1.5, 1], 0.0, "actual_batches of rank 0 must be an int"),
        ([1e300, 1.0], [1, 1], 0.0, "wall_ms of rank 0 is not a time"),
        ([1.0], [1, 1], 0.0, "wall_ms must hold one value for each of 2 ranks"),
        ([1.0, 1.0], [1], 0.0, "actual_batches must hold one value"),
        ([1.0, 1.0], [1, 1], math.nan, "sync_ms must be finite"),
        ([1.0, 1.0], [1, 1], -1.0, "sync_ms must be finite"),
    ],
)
def test_impossible_timings_are_refused_whole(
    wall_ms: list[float], batches: list[int], sync_ms: float, message: str
) -> None:
    che = el_che(2)
    report(che, [10.0, 40.0])
    before = (che.anchor, che.batch_counts, che.ms_per_batch)
    with pytest.raises(ValueError, match=message):
        che.report_timing(wall_ms, batches, sync_ms)
    assert (che.anchor, che.batch_counts, che.ms_per_batch) == before


@pytest.mark.parametrize(("factor", "reports"), [(1.5, 2), (2.0, 2), (5.0, 4)])
def test_a_lasting_rise_is_answered_in_proportion(factor: float, reports: int) -> None:
    che = el_che(2, overhead_target=0.10)
    for _ in range(5):
        report(che, [10.0, 40.0], sync_ms=40.0)  # 10 % of 400 ms
        assert che.anchor == 10
    anchors = []
    for _ in range(8):
        report(che, [10.0, 40.0], sync_ms=40.0 * factor)
        anchors.append(che.anchor)
    final = round(10 * factor)
    assert anchors.index(final) + 1 == reports == 1 + math.ceil(math.log2(factor))
    assert anchors[reports - 1 :] == [final] * (9 - reports)
    assert all(b <= 2 * a for a, b in zip([10, *anchors], anchors, strict=False))


@pytest.mark.parametrize("position", range(6))
def test_one_spike_does_not_move_the_anchor(position: int) -> None:
    che = el_che(2, overhead_target=0.10)
    for index in range(8):
        report(che, [10.0, 40.0], sync_ms=4000.0 if index == position else 36.0)
        assert che.anchor == 10


def test_a_short_last_window_is_no_overhead() -> None:
    che = el_che(2, overhead_target=0.10)
    for _ in range(6):
        report(che, [10.0, 40.0], sync_ms=36.0)
        che.report_timing([10.0, 40.0], [1, 1], 36.0)
        assert che.anchor == 10


@pytest.mark.parametrize(
    ("sync_ms", "anchors"),
    [
        (40.0, [100, 60, 40, 30, 25, 22, 21, 20, 20]),  # 40 / (20 * 40) is half of 10 %
        (95.0, [100, 74, 61, 54, 51, 49, 48, 48]),
        (0.1, [100, 50, 25, 13, 7, 5, 5]),
    ],
)
def test_the_anchor_falls_to_half_the_target(
    sync_ms: float, anchors: list[int]
) -> None:
    che = el_che(2, anchor=100, min_anchor=5, overhead_target=0.10)
    for anchor in anchors:  # the first sample decides nothing
        report(che, [10.0, 40.0], sync_ms=sync_ms)
        assert che.anchor == anchor


def test_two_stalls_in_a_row_are_soon_forgotten() -> None:
    """As in the demo, where a reduction takes 7 ms of a window of five times 85 ms."""
    che = el_che(2, anchor=1)
    anchors = []
    for sync_ms in [7.0] * 6 + [51.0] * 2 + [7.0] * 6:
        report(che, [21.0, 85.0], sync_ms)
        anchors.append(che.anchor)
    assert anchors[5] == 3
    assert max(anchors) == 12
    assert anchors[-2:] == [6, 6]


def test_room_is_made_at_once_and_kept_until_less_is_asked() -> None:
    che = el_che(2, overhead_target=0.10)
    che.make_room(4_000.0)
    assert che.anchor == 10  # nothing is known of a batch yet
    report(che, [10.0, 40.0], sync_ms=0.0)
    che.make_room(3_990.0)
    assert (che.anchor, che.batch_counts) == (100, (400, 100))
    for _ in range(5):
        report(che, [10.0, 40.0], sync_ms=0.01)
    assert che.anchor == 100
    che.make_room(2_000.0)
    assert che.anchor == 100  # not more than twice that
    for _ in range(60):
        report(che, [10.0, 40.0], sync_ms=0.01)
    assert che.anchor == 50  # by one per report, as far as it may
    with pytest.raises(ConfigError, match="least_ms must be"):
        che.make_room(math.nan)


def test_room_for_a_pause_is_given_back_at_once() -> None:
    """It fell by one per window once: 180 windows of up to 200 batches."""
    che = el_che(2, max_anchor=200)
    report(che, [10.0, 40.0], sync_ms=0.0)
    che.make_room(30_000.0)
    assert (che.anchor, che.batch_counts) == (200, (800, 200))
    che.make_room(1_200.0)
    assert (che.anchor, che.batch_counts) == (30, (120, 30))
    che.make_room(40.0)
    assert che.anchor == 10  # what it was before any room was made


def test_room_given_back_leaves_what_the_tuning_had_reached() -> None:
    che = el_che(2, max_anchor=200, overhead_target=0.10)
    for _ in range(6):
        report(che, [10.0, 40.0], sync_ms=240.0)
    assert che.anchor == 60
    che.make_room(8_000.0)
    che.make_room(40.0)
    assert che.anchor == 60


def test_room_is_given_back_to_another_membership_too() -> None:
    che = el_che(2, max_anchor=200)
    report(che, [10.0, 40.0], sync_ms=0.0)
    che.make_room(30_000.0)
    other = che.resized([0, 1])
    assert other.anchor == 200
    other.make_room(400.0)
    assert other.anchor == 10


def test_the_dead_zone_works_at_small_anchors() -> None:
    """At a count of 2 the reference needs half again as much to react."""
    che = el_che(2, anchor=1)
    report(che, [10.0, 20.0])
    assert che.batch_counts == (2, 1)
    for _ in range(20):
        report(che, [7.5, 20.0])  # 2.67 instead of 2
    assert che.batch_counts == (3, 1)


def test_the_dead_zone_leaves_no_rank_at_another_anchor() -> None:
    che = el_che(3, anchor=20, min_anchor=1, overhead_target=0.50)
    report(che, [10.0, 20.0, 40.0], sync_ms=190.0)
    while che.anchor > 19:
        report(che, [10.0, 20.0, 40.0], sync_ms=190.0)
    assert che.batch_counts == (76, 38, 19)  # 5 % each, all of them


def test_equal_ranks_do_not_flap_under_jitter() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        che = el_che(2)
        report(che, [10.0, 10.0])
        for _ in range(200):
            report(che, [10.0 * rng.uniform(0.95, 1.05) for _ in range(2)])
            assert che.batch_counts == (10, 10)
            assert che.anchor_wall_ms == pytest.approx(100.0, rel=0.035)


def test_nudges_shorten_at_once_and_the_tuning_recovers() -> None:
    che = el_che(2, overhead_target=0.10, max_batch_diff=3)
    for _ in range(30):
        report(che, [10.0, 40.0], sync_ms=36.0)
    assert che.batch_counts == (40, 10)
    che.nudge_anchor_down(0.5)
    assert (che.anchor, che.batch_counts) == (5, (20, 5))
    che.nudge_anchor_down(0.0)
    assert (che.anchor, che.batch_counts) == (1, (4, 1))
    che.nudge_anchor_down(0.1)
    assert che.anchor == 1
    for _ in range(30):
        report(che, [10.0, 40.0], sync_ms=36.0)
    assert (che.anchor, che.batch_counts) == (10, (40, 10))
    with pytest.raises(ConfigError, match="factor must be finite"):
        che.nudge_anchor_down(math.nan)


@pytest.mark.parametrize(
    ("anchor", "factor", "expected"),
    [(10, 0.5, 5), (10, 0.25, 3), (10, 0.01, 1), (30, 0.1, 3), (10, 2.0, 10)],
)
def test_a_nudge_rounds_up(anchor: int, factor: float, expected: int) -> None:
    che = el_che(2, anchor=anchor)
    che.nudge_anchor_down(factor)
    assert che.anchor == expected
    assert che.batch_counts == (expected, expected)


def test_a_nudge_works_on_hints_before_calibration() -> None:
    che = el_che(2, speed_hints={0: 4.0})
    che.nudge_anchor_down(0.5)
    assert che.batch_counts == (20, 5)


def test_max_batch_diff_limits_each_move_and_keeps_one_scale() -> None:
    che = el_che(2, max_batch_diff=6)
    report(che, [10.0, 40.0])
    assert che.batch_counts == (40, 10)  # calibration is free
    assert che.max_batch_diff == 6
    seen = [che.batch_counts]
    for _ in range(40):
        report(che, [10.0, 40.0], sync_ms=24.0)
        seen.append(che.batch_counts)
    assert che.batch_counts == (80, 20)
    for old, new in itertools.pairwise(seen):
        assert max(abs(a - b) for a, b in zip(old, new, strict=True)) <= 6
        assert abs(new[0] - 4 * new[1]) <= 2.5  # rounding of one scale, no more


@pytest.mark.parametrize(
    ("ms", "anchor", "total", "expected"),
    [
        ([1.0, 100.0, 100.0], 1, 50, (49, 1, 0)),  # the reference gives 51
        ([1.0, 1.0, 1.0], 10, 2, (1, 1, 0)),  # the reference gives 3
        ([1.0, 4.0], 10, 25, (20, 5)),
        ([1.0, 4.0], 10, 7, (6, 1)),
        ([1.0, 4.0], 10, 50, (40, 10)),
        ([1.0, 4.0], 10, 99, (40, 10)),
        ([1.0, 4.0], 10, 0, (0, 0)),
        ([5.0], 10, 3, (3,)),
    ],
)
def test_clamp_total_gives_out_what_is_left_exactly(
    ms: list[float], anchor: int, total: int, expected: tuple[int, ...]
) -> None:
    che = el_che(len(ms), anchor=anchor)
    report(che, ms)
    assert che.clamp_total(total) == expected
    with pytest.raises(ConfigError, match="max_total must be at least 0"):
        che.clamp_total(-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"anchor": 0}, "anchor must be at least 1"),
        ({"anchor": 1.5}, "anchor must be an integer"),
        ({"max_anchor": -1}, "max_anchor must be at least 0"),
        ({"min_anchor": 0}, "min_anchor must be at least 1"),
        ({"min_anchor": 20, "max_anchor": 10}, "min_anchor must be at most"),
        ({"max_batch_diff": -1}, "max_batch_diff must be at least 0"),
        ({"overhead_target": math.nan}, "overhead_target must be a finite"),
        ({"overhead_target": math.inf}, "overhead_target must be a finite"),
        ({"speed_hints": {1: -0.4}}, "speed_hints of rank 1"),
        ({"speed_hints": [1.0, math.inf]}, "rank 1 must be positive"),
        ({"speed_hints": [1.0]}, "each of 2 ranks, got 1"),
        ({"speed_hints": {2: 1.0}}, "names rank 2, but ranks are 0 to 1"),
        ({"speed_hints": {-1: 1.0}}, "names rank -1"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElCheConfig(**{"world_size": 2, **options})  # type: ignore[arg-type]


def test_settings_are_brought_into_range_and_fixed() -> None:
    assert ElCheConfig(world_size=2).overhead_target == 0.03
    assert ElCheConfig(world_size=2, overhead_target=0).overhead_target == 0.01
    assert ElCheConfig(world_size=2, overhead_target=9).overhead_target == 0.50
    assert el_che(2, anchor=2, min_anchor=5).anchor == 5
    config = ElCheConfig(world_size=2, speed_hints={1: 0.5})
    assert config.speed_hints == (1.0, 0.5)
    assert hash(config) == hash(ElCheConfig(world_size=2, speed_hints=[2, 1]))
    with pytest.raises(dataclasses.FrozenInstanceError, match="anchor"):
        config.anchor = 3  # type: ignore[misc]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_has_no_count(rank: int) -> None:
    with pytest.raises(ConfigError, match="rank must be 0 to 1"):
        el_che(2).batches(rank)


def test_another_membership_keeps_what_is_known_of_those_who_stay() -> None:
    che = el_che(3, anchor=4, max_anchor=50)
    for _ in range(4):
        report(che, [10.0, 20.0, 40.0], sync_ms=30.0)
    smaller = che.resized([0, 2])
    assert smaller.world_size == 2
    assert smaller.anchor == che.anchor
    assert smaller.ms_per_batch == pytest.approx((10.0, 40.0))
    assert smaller.batch_counts == (4 * che.anchor, che.anchor)
    assert che.resized([0, 1]).batch_counts == (2 * che.anchor, che.anchor)
    larger = che.resized([2, None, 0])
    assert larger.ms_per_batch == pytest.approx((40.0, 0.0, 10.0))
    # A rank that nobody has measured counts as the slowest one.
    assert larger.batch_counts == (che.anchor, che.anchor, 4 * che.anchor)
    assert che.world_size == 3


def test_hints_stay_with_their_ranks_and_newcomers_have_none() -> None:
    che = el_che(2, anchor=4, speed_hints=(1.0, 0.25))
    assert che.resized([1, 0]).batch_counts == (4, 16)
    assert che.resized([1, None]).batch_counts == (4, 16)
