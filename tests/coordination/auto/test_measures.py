"""What ranks report of their steps tells of a cluster, and when that is enough."""

from __future__ import annotations

from typing import Any

import pytest

from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster
from elche.cadence.rank_time import RankTimes
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.auto.first_choice import MOST_STEPS
from elche.coordination.auto.measures import (
    ONE_SIZE_DOUBT,
    USUAL_EPOCHS,
    Measures,
    RunLength,
)
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from tests.coordination.sync.granted_steps import grants_in, members, ran, run_epoch
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


def first_choice(
    fixed_s: float,
    sync_s: float,
    run_steps: int,
    slower: float = 1.0,
    compiling_s: float = 0.0,
) -> tuple[int, Choice]:
    """Warm steps until the choice, and the choice; two devices, 1 ms per sample."""

    def report(grant: GrantBatches, rank: int) -> StepsDone:
        sizes = grant.shares
        took_s = [fixed_s + 0.001 * sizes[0], slower * (fixed_s + 0.001 * sizes[1])]
        took_s = [took + compiling_s * (not grant.start) for took in took_s]
        wait_s = sync_s + max(took_s) - took_s[rank]
        return ran(grant, rank, took_s[rank], sync_wait_s=wait_s)

    chooser, told = measured(2, sync_s, run_steps, report)
    assert chooser._choice is not None
    return told[-1].start, chooser._choice


def measured(
    ranks: int, sync_s: float, run_steps: int, report: Any
) -> tuple[AutoChooser, list[GrantBatches]]:
    """Steps of ranks until the first choice."""
    settings = Settings(config=RunConfig(policy="auto"), epochs=1)
    chooser = AutoChooser(members(*["cpu"] * ranks), settings)
    return chooser, steps_of(chooser, sync_s, run_steps, report)


def steps_of(
    chooser: AutoChooser, sync_s: float, steps: int, report: Any
) -> list[GrantBatches]:
    """An epoch's steps until the first choice."""
    chooser.prepare(sync_s, 0.0, alike=True)
    sizes = BatchSizes.of([BATCH] * steps)
    told = run_epoch(chooser, sizes, report, lambda: chooser._choice is not None)
    return [grant for _, grant in grants_in(told)]


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ((0.01, 1.0, 300), 0),  # a reduction takes a hundredth of the run
        ((0.0, 2.0, 200, 1.0, 0.65), 1),  # a first step that compiled
        ((0.2, 0.1, 100_000, 8.0), 2),  # nearly all of a step is fixed
    ],
)
def test_few_steps_decide_for_one_device(run: tuple[Any, ...], steps: int) -> None:
    made_after, found = first_choice(*run)
    assert (made_after, found.is_alone) == (steps, True)


@pytest.mark.parametrize(("run_steps", "least"), [(1000, 2), (100_000, MOST_STEPS)])
def test_a_clear_gain_is_made_sure_of_where_that_is_free(
    run_steps: int, least: int
) -> None:
    steps, found = first_choice(0.0, 0.05, run_steps)
    assert not found.is_alone
    assert found.policy == "async"
    assert least <= steps <= (least if least == MOST_STEPS else 6)


def test_the_fastest_rank_gets_the_whole_batch_in_every_other_step() -> None:
    """Which shows what it would take alone, and what is fixed of the others' steps."""
    _, told = measured(3, 0.001, 10_000, unequal)
    alternates(told)


def unequal(grant: GrantBatches, rank: int) -> StepsDone:
    busy_s = (0.004, 0.002, 0.003)[rank] * (0.5 + grant.shares[rank])
    return ran(grant, rank, busy_s, sync_wait_s=0.001)


def alternates(told: list[GrantBatches]) -> None:
    shares = [grant.shares for grant in told]
    assert shares[2] == shares[4] == (1, BATCH - 2, 1)
    assert min(shares[0] + shares[1] + shares[3]) > 1


def test_a_join_before_the_choice_begins_the_measured_steps_again() -> None:
    """An odd count of them, kept, would grant least shares at once."""
    settings = Settings(config=RunConfig(policy="auto"), epochs=10_000)
    *two, newcomer = members(*["cpu"] * 3)
    chooser = AutoChooser(two, settings)
    assert len(steps_of(chooser, 0.001, 2, unequal)) == 2
    assert chooser._measures.count == 1
    chooser.add(newcomer)
    alternates(steps_of(chooser, 0.001, 8, unequal))
