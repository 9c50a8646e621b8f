"""What `auto` measures, from what ranks report."""

from __future__ import annotations

import pytest

from elche.config import RunConfig
from elche.coordination.auto.auto_gauge import ONE_SIZE_DOUBT, Gauge
from elche.coordination.protocol.events import BatchesDone, StepsDone, WindowReduced

BATCH = 32


def gauge_of(world_size: int = 2) -> Gauge:
    return Gauge(RunConfig(policy="auto"), world_size, min_share_samples=1)


def steps(
    gauge: Gauge,
    samples: list[int],
    step_s: list[float],
    exposed_s: float = 0.0,
    count: int = 1,
    *,
    warm: bool = True,
) -> bool:
    """All ranks run so many steps of these samples, in this time each."""
    last_s = max(step_s)
    return gauge.took_steps(
        [
            StepsDone(
                rank=rank,
                epoch=0,
                start=0,
                stop=count,
                samples=count * samples[rank],
                busy_s=count * step_s[rank],
                data_wait_s=0.0,
                sync_wait_s=count * (last_s - step_s[rank] + exposed_s),
                warm=warm,
                backward_passes=count,
            )
            for rank in range(len(samples))
        ]
    )


def cold_reports(samples: list[int], step_s: list[float]) -> list[StepsDone]:
    """Of a first step, all of it together on both ranks."""
    return [
        StepsDone(
            rank=rank,
            epoch=0,
            start=0,
            stop=1,
            samples=samples[rank],
            busy_s=step_s[rank],
            data_wait_s=0.0,
            sync_wait_s=max(step_s) - step_s[rank],
            warm=False,
            backward_passes=1,
        )
        for rank in range(len(samples))
    ]


def batches(rank: int, batch_s: float, count: int = 1) -> BatchesDone:
    return BatchesDone(
        rank=rank,
        epoch=0,
        window=0,
        start=0,
        stop=count,
        samples=count * BATCH,
        busy_s=count * batch_s,
        data_wait_s=0.0,
        timed=count,
        timed_s=count * batch_s,
    )


def reduced(rank: int, window: int, sync_s: float, adopted_at: int) -> WindowReduced:
    return WindowReduced(
        rank=rank,
        epoch=0,
        window=window,
        sync_s=sync_s,
        wait_s=0.5,
        divergence=0.0,
        adopted_at=adopted_at,
    )


def test_a_third_of_a_whole_batch_counts_as_fixed_while_steps_have_one_size() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.02, 0.08])
    gauge.learn(0.001)
    found = gauge.cluster(BATCH)
    assert found.fixed_s == pytest.approx((0.01, 0.04))
    assert found.global_batch_size == 2 * found.batch_size == BATCH
    assert found.batch_s(0) == pytest.approx(0.02)
    assert gauge.batch_s(0, BATCH) == pytest.approx(0.03)
    assert found.batch_s(1) == pytest.approx(0.08)
    assert not gauge.has_sizes
    assert gauge.doubt == ONE_SIZE_DOUBT


def test_steps_of_other_sizes_tell_what_a_step_costs_beside_its_samples() -> None:
    gauge = gauge_of()
    for samples in ([16, 16], [32, 0], [0, 32]):  # no share: one sample is run
        for _ in range(2):
            run = [count or 1 for count in samples]
            steps(gauge, samples, [0.03 + 0.001 * run[0], 0.01 + 0.002 * run[1]])
    gauge.learn(0.0)
    found = gauge.cluster(BATCH)
    assert found.fixed_s == pytest.approx((0.03, 0.01))
    assert found.seconds_per_sample == pytest.approx((0.001, 0.002))
    assert found.jitter == pytest.approx(0.0, abs=1e-9)


def test_a_step_that_is_no_slower_with_more_samples_is_all_fixed() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.03, 0.03])
    steps(gauge, [32, 16], [0.02, 0.03])
    gauge.learn(0.0)
    fixed_s = gauge.cluster(BATCH).fixed_s
    assert 0.02 < fixed_s[0] < 0.03
    assert gauge.batch_s(0, 320) == pytest.approx(fixed_s[0], rel=1e-4)
    # As on the other rank, whose steps were of two sizes.
    assert gauge.batch_s(1, 320) == pytest.approx(fixed_s[1], rel=1e-4)


def test_few_steps_that_jitter_do_not_show_another_fixed_part_than_other_ranks() -> (
    None
):
    gauge = gauge_of(3)
    for samples in (1, 32):
        usual_s = 0.01 + 0.001 * samples
        # The second rank seems to have no fixed part, the third one has none.
        second_s = usual_s * (1.15 if samples > 1 else 0.95)
        third_s = 0.0001 + 0.004 * samples
        steps(gauge, [samples] * 3, [usual_s, second_s, third_s])
    gauge.learn(0.0)
    found = gauge.cluster(BATCH)
    ratios = [
        f / s for f, s in zip(found.fixed_s, found.seconds_per_sample, strict=True)
    ]
    assert ratios[:2] == pytest.approx([ratios[1]] * 2)
    assert ratios[2] < 0.1


def test_a_step_that_was_compiled_weighs_little() -> None:
    gauge = gauge_of()
    for samples, step_s in ((1, 0.011), (1, 2.0), (32, 0.042), (32, 0.042)):
        steps(gauge, [samples] * 2, [step_s] * 2)
    gauge.learn(0.0)
    assert gauge.batch_s(0, 128) == pytest.approx(0.138, rel=0.05)


def test_cold_steps_are_no_measure() -> None:
    gauge = gauge_of()
    assert not steps(gauge, [16, 16], [5.0, 5.0], warm=False)
    assert gauge.measurements == 0
    assert steps(gauge, [16, 16], [0.02, 0.02])
    assert gauge.measurements == 1
    gauge.learn(0.0)
    assert gauge.batch_s(0, 16) == pytest.approx(0.02)


def test_a_glance_takes_cold_steps_and_leaves_the_gauge_as_it_was() -> None:
    gauge = gauge_of()
    reports = cold_reports([16, 16], [5.0, 2.5])
    gauge.took_steps(reports)
    quick = gauge.quick_gauge(reports, 3.0)
    found = quick.cluster(BATCH)
    assert found.sync_s == pytest.approx(3.0)
    assert [found.batch_s(rank) for rank in (0, 1)] == pytest.approx([5.0, 2.5])
    assert gauge.measurements == 0
    assert quick.is_cold
    quick.finish_learning()
    quick.trained(batches(0, 0.5))  # warm now
    quick.trained(batches(1, 0.25))
    quick.follow()
    assert not quick.is_cold
    assert quick.batch_s(0, BATCH) == pytest.approx(0.5)
    assert quick.batch_s(1, BATCH) == pytest.approx(0.25)


def test_what_shows_of_a_reduction_tells_how_much_hides_and_follows_the_link() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.03, 0.02], exposed_s=0.002)
    gauge.learn(0.01)
    gauge.finish_learning()
    found = gauge.cluster(BATCH)
    assert found.sync_s == pytest.approx(0.01)
    assert found.hidden == pytest.approx(0.8)
    for exposed_s, expected_s in ((0.004, 0.02), (0.08, 0.08 + 2.0 / 3.0 * 0.03)):
        steps(gauge, [16, 16], [0.03, 0.02], exposed_s)
        gauge.follow()
        assert gauge.cluster(BATCH).sync_s == pytest.approx(expected_s)


def test_a_reduction_that_shows_more_than_was_probed_takes_what_it_shows() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.03, 0.02], exposed_s=0.05)
    gauge.learn(0.01)
    found = gauge.cluster(BATCH)
    assert (found.sync_s, found.hidden) == (pytest.approx(0.05), pytest.approx(0.0))


def test_speeds_are_followed_under_steps_and_under_windows() -> None:
    gauge = gauge_of()
    for samples in (8, 24):
        steps(gauge, [samples] * 2, [0.00125 * samples] * 2)
    gauge.learn(0.0)
    gauge.finish_learning()
    steps(gauge, [8, 24], [0.02, 0.03], count=4)
    gauge.follow()
    assert gauge.batch_s(0, BATCH) == pytest.approx(0.08)  # twice as slow
    assert gauge.batch_s(1, BATCH) == pytest.approx(0.04)
    gauge.trained(batches(1, 0.12, count=3))
    gauge.follow()
    assert gauge.batch_s(0, BATCH) == pytest.approx(0.08)  # trained on nothing
    assert gauge.batch_s(1, BATCH) == pytest.approx(0.12)


def test_a_windows_reduction_lasts_as_long_as_its_quickest_adoption() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.02, 0.08])
    steps(gauge, [32, 32], [0.04, 0.16])
    gauge.learn(0.001)
    gauge.finish_learning()
    for window in range(3):
        assert not gauge.reduced(reduced(0, window, 0.001, adopted_at=8), BATCH)
        assert gauge.measurements == window
        assert gauge.reduced(reduced(1, window, 0.001, adopted_at=2), BATCH)
    assert gauge.measurements == 3
    gauge.follow()
    assert gauge.measurements == 0
    assert gauge.cluster(BATCH).sync_s == pytest.approx(1.5 * 0.16 + 0.001)


def test_a_rank_that_trains_nothing_waits_for_all_of_a_reduction() -> None:
    gauge = gauge_of()
    steps(gauge, [16, 16], [0.02, 0.08])
    steps(gauge, [32, 32], [0.04, 0.16])
    gauge.learn(0.001)
    gauge.finish_learning()
    gauge.reduced(reduced(0, 0, 0.001, adopted_at=6), BATCH)
    gauge.reduced(reduced(1, 0, 0.21, adopted_at=0), BATCH)
    gauge.follow()
    assert gauge.cluster(BATCH).sync_s == pytest.approx(0.21)


def test_rounding_leaves_no_step_with_less_than_no_fixed_time() -> None:
    """Once -3e-18 s of it ended a run."""
    for samples in range(3, 60):
        for milliseconds in range(7, 40, 3):
            gauge = gauge_of()
            step_s = milliseconds / 1000.0
            steps(gauge, [1, samples], [step_s / samples / 2.0, step_s / samples / 2.0])
            steps(gauge, [samples, 1], [step_s, step_s])
            gauge.learn(0.001)
            assert min(gauge.cluster(BATCH).fixed_s) >= 0.0


def test_the_fastest_rank_gets_the_whole_batch_in_every_other_step() -> None:
    gauge = gauge_of(3)
    steps(gauge, [11, 11, 10], [0.04, 0.02, 0.03])
    gauge.learn(0.0)
    assert [gauge.to_spare(BATCH, count) for count in (1, 2, 3)] == [
        (0, 2),
        (),
        (0, 2),
    ]
