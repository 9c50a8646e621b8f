"""Measurements of a cluster, from what ranks report of their steps."""

from __future__ import annotations

import pytest

from elche.cadence.goodput import MeasuredCluster
from elche.cadence.rank_time import RankTimes
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.measures import (
    ONE_SIZE_DOUBT,
    USUAL_EPOCHS,
    Measures,
    RunLength,
)
from tests.coordination.test_core import steps_done

BATCH = 32


class Cluster:
    """Ranks whose steps are measured, as ``sync`` has them measured."""

    def __init__(self, world_size: int = 2) -> None:
        self.times = RankTimes()
        self.ranks = range(world_size)
        self.measures = Measures(Settings(config=RunConfig(policy="auto")), self.times)

    def run(
        self,
        samples: list[int],
        step_s: list[float],
        exposed_s: float = 0.0,
        count: int = 1,
        *,
        warm: bool = True,
    ) -> None:
        """All ranks run so many steps of these samples, in this time each."""
        last_s = max(step_s)
        for rank in self.ranks if warm else ():
            self.times[rank].observe(samples[rank], step_s[rank])
        reports = [
            steps_done(
                rank,
                0,
                count,
                samples=count * samples[rank],
                busy_s=count * step_s[rank],
                sync_wait_s=count * (last_s - step_s[rank] + exposed_s),
                warm=warm,
            )
            for rank in self.ranks
        ]
        self.measures.take(reports, count)

    def found(self) -> MeasuredCluster:
        return self.measures.cluster(self.ranks, BATCH, 1000.0)

    def batch_s(self, rank: int, samples: int) -> float:
        cluster = self.found()
        return float(cluster.fixed_s[rank] + samples * cluster.seconds_per_sample[rank])


def test_a_third_of_a_whole_batch_counts_as_fixed_while_steps_have_one_size() -> None:
    cluster = Cluster()
    cluster.run([16, 16], [0.02, 0.08])
    found = cluster.found()
    assert found.fixed_s == pytest.approx((0.01, 0.04))
    assert found.global_batch_size == 2 * found.batch_size == BATCH
    assert found.batch_s(0) == pytest.approx(0.02)
    assert found.batch_s(1) == pytest.approx(0.08)
    assert cluster.batch_s(0, BATCH) == pytest.approx(0.03)
    assert cluster.measures.doubt == ONE_SIZE_DOUBT


def test_steps_of_other_sizes_tell_what_a_step_costs_beside_its_samples() -> None:
    cluster = Cluster()
    for samples in ([16, 16], [31, 1], [1, 31]) * 3:
        cluster.run(samples, [0.032 + 0.001 * samples[0], 0.008 + 0.002 * samples[1]])
    found = cluster.found()
    assert found.fixed_s == pytest.approx((0.032, 0.008), rel=0.05)
    assert found.seconds_per_sample == pytest.approx((0.001, 0.002), rel=0.05)


def test_few_steps_that_jitter_do_not_show_another_fixed_part_than_other_ranks() -> (
    None
):
    cluster = Cluster(3)
    for samples in (1, 31):
        usual_s = 0.016 + 0.001 * samples
        # The second rank seems to have less of a fixed part, the third one has none.
        second_s = usual_s * (1.1 if samples > 1 else 0.95)
        cluster.run([samples] * 3, [usual_s, second_s, 0.004 * samples])
    found = cluster.found()
    pairs = zip(found.fixed_s, found.seconds_per_sample, strict=True)
    ratios = [fixed_s / sample_s for fixed_s, sample_s in pairs]
    assert ratios[0] == ratios[1] == 16.0
    assert ratios[2] < 1.0


def test_a_fixed_part_of_equal_seconds_is_not_taken_for_equal_samples() -> None:
    """Once the fast rank's was 1.4 ms here, and windows looked 10 % better."""
    cluster = Cluster()
    for samples in ([16, 16], [31, 1]) * 2:
        fast, slow = samples
        cluster.run(samples, [0.004 + 0.00125 * fast, 0.004 + 0.005 * slow])
    assert cluster.found().fixed_s == pytest.approx((0.004, 0.004), rel=0.35)


def test_a_rank_that_is_not_measured_is_as_the_others_usually_are() -> None:
    cluster = Cluster()
    for samples in ([16, 16], [31, 1]):
        cluster.run(samples, [0.001 * samples[0], 0.003 * samples[1]])
    cluster.ranks = range(3)
    found = cluster.found()
    assert found.seconds_per_sample == pytest.approx((0.001, 0.003, 0.002), rel=0.01)


def test_cold_steps_tell_of_ranks_only_while_nothing_else_does() -> None:
    cluster = Cluster()
    cluster.run([16, 16], [5.0, 2.5], exposed_s=3.0, warm=False)
    found = cluster.found()
    assert cluster.measures.count == 0
    assert found.sync_s == pytest.approx(3.0)
    assert [found.batch_s(rank) for rank in (0, 1)] == pytest.approx([5.0, 2.5])
    assert not cluster.times
    cluster.run([16, 16], [0.02, 0.02], exposed_s=0.001)
    assert cluster.measures.count == 1
    assert cluster.found().batch_s(0) == pytest.approx(0.02)
    assert cluster.found().sync_s == pytest.approx(0.001)


def test_what_shows_of_a_reduction_tells_how_much_hides_and_follows_the_link() -> None:
    cluster = Cluster()
    cluster.measures.probe_s = 0.01
    cluster.run([16, 16], [0.03, 0.02], exposed_s=0.002)
    found = cluster.found()
    assert found.sync_s == pytest.approx(0.01)
    assert found.hidden == pytest.approx(0.8)
    for exposed_s, expected_s in ((0.004, 0.02), (0.08, 0.08 + 2.0 / 3.0 * 0.03)):
        cluster.measures.settle()
        cluster.run([16, 16], [0.03, 0.02], exposed_s)
        assert cluster.found().sync_s == pytest.approx(expected_s)
        assert cluster.measures.doubt == 0.0


def test_a_reduction_that_shows_more_than_was_probed_takes_what_it_shows() -> None:
    cluster = Cluster()
    cluster.measures.probe_s = 0.01
    cluster.run([16, 16], [0.03, 0.02], exposed_s=0.05)
    found = cluster.found()
    assert (found.sync_s, found.hidden) == (pytest.approx(0.05), pytest.approx(0.0))


def test_doubt_falls_with_each_step() -> None:
    cluster = Cluster()
    doubts = []
    for samples in ([16, 16], [31, 1]) * 6:
        cluster.run(samples, [0.001 * samples[0], 0.003 * samples[1]])
        doubts.append(cluster.measures.doubt)
    assert doubts[1:] == sorted(doubts[1:], reverse=True)
    assert doubts[-1] < 0.05


@pytest.mark.parametrize(
    ("said", "begun", "expected"),
    [
        (None, 0, USUAL_EPOCHS),
        (None, 4, USUAL_EPOCHS),
        (None, 49, 100),
        (3, 0, 3),
        (3, 2, 3),
        (3, 3, USUAL_EPOCHS),
        (20, 20, 42),
    ],
)
def test_a_run_is_as_long_as_was_said_or_ten_epochs_or_twice_what_was_begun(
    said: int | None, begun: int, expected: int
) -> None:
    length = RunLength(said)
    length.begin_epoch(begun, BatchSizes.of([32] * 100 + [8]))
    length.begin_epoch(begun, BatchSizes.of([32] * 7))  # the rest of the same
    assert length.batches == expected * 101
    assert ("assuming" in str(length)) == (said is None)
