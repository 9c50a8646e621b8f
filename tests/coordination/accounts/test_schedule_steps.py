"""Steps of schedulers in windows, and updates of the model's copies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.copy_updates import CopySamples, DueUpdates
from elche.coordination.accounts.schedule_steps import ScheduleSteps, common_periods
from elche.errors import MismatchError
from tests.harness.reached import reach


@dataclass
class Rank:
    """A rank's loop, which calls every ``period`` of its own batches."""

    steps: ScheduleSteps
    period: int
    batches: int = 0

    def run(self, batches: float) -> None:
        """Runs a batch that begins after so many global batches of the epoch."""
        due = self.steps.due(batches)
        assert due >= 0
        self.steps.taken += due
        self.batches += 1
        if self.batches % self.period == 0:
            assert self.steps.called()
        self.steps.batch_done()


@dataclass
class Epoch:
    """Ranks that go from window to window; planned and done batches are drawn."""

    sizes: BatchSizes
    ranks: list[Rank]
    committed: int = 0

    def window(self, planned: list[int], done: list[int], batch_samples: int) -> None:
        """Runs a window as far as the epoch goes, and commits it."""
        left = self.sizes.num_samples - self.committed
        planned_samples = min(left, sum(planned) * batch_samples)
        trained = 0
        for rank, plan, count in zip(self.ranks, planned, done, strict=True):
            for at in range(count):
                if trained == left:
                    break
                part = min(1.0, at / max(1, plan))
                samples = self.committed + planned_samples * part
                rank.run(self.sizes.batches_in(samples))
                trained += min(batch_samples, left - trained)
        self.committed += trained
        reports = {at: (rank.steps.report,) for at, rank in enumerate(self.ranks)}
        (period,) = common_periods(reports)
        for rank in self.ranks:
            rank.steps.agree(period)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Epoch, int, int, int | None]:
    """An epoch that has not begun, its period, its local batch, steps left."""
    world, size = draw(st.sampled_from([2, 3, 1])), draw(st.sampled_from([6, 12]))
    batches = draw(st.sampled_from([40, 23, 1]) | st.integers(1, 40))
    sizes = BatchSizes.of([*[size] * (batches - 1), draw(st.integers(1, size))])
    period = draw(st.integers(1, 4))
    most = draw(st.sampled_from([None, 3, 20]))
    ranks = [Rank(ScheduleSteps(batches, most), period) for _ in range(world)]
    return Epoch(sizes, ranks), period, draw(st.sampled_from([size, size // 2])), most


COUNTS = st.lists(st.integers(0, 5), min_size=3, max_size=3)


@pytest.mark.reaches("a commit", "an overestimate", "the end of a schedule")
@given(epochs(), st.lists(st.tuples(COUNTS, COUNTS), max_size=30), st.booleans())
def test_ranks_step_together_as_one_device_has_by_the_epochs_end(
    drawn: tuple[Epoch, int, int, int | None],
    windows: list[tuple[list[int], list[int]]],
    is_exact: bool,
) -> None:
    epoch, period, batch_samples, most = drawn
    sizes, ranks = epoch.sizes, epoch.ranks
    whole = sizes.num_batches // period
    plain = whole if most is None else min(whole, most)
    for planned, done in [*windows, *[([5, 5, 5], [5, 1, 2])] * 500]:
        if epoch.committed == sizes.num_samples:
            break
        before = [rank.steps.taken for rank in ranks]
        counts = (planned if is_exact else done)[: len(ranks)]
        epoch.window(planned[: len(ranks)], counts, batch_samples)
        taken = [rank.steps.taken for rank in ranks]
        assert all(was <= now <= plain for was, now in zip(before, taken, strict=True))
        known = ranks[0].steps.period
        assert {rank.steps.period for rank in ranks} == {known}
        if known == period and epoch.committed < sizes.num_samples:
            batches = sizes.batches_in(epoch.committed)
            due = int(batches) // period
            due = due if most is None else min(due, most)
            for rank in ranks:  # corrected, but never backwards
                ahead = rank.steps.taken
                rank.steps.taken += rank.steps.due(batches)
                assert rank.steps.taken == max(ahead, due)
                reach("an overestimate", ahead > due)
            reach("a commit")
    reach("the end of a schedule", most is not None and most < whole)
    if any(rank.steps._calls for rank in ranks):
        for rank in ranks:
            rank.steps.taken += rank.steps.due_at_end(sizes.num_batches)
            assert rank.steps.taken == plain


@given(st.integers(1, 6), st.lists(st.floats(0, 40), min_size=1, max_size=40))
def test_ranks_that_know_the_same_step_by_progress_alone(
    period: int, progress: list[float]
) -> None:
    """Whatever else each of them has seen, where none is ahead."""
    one, other = ScheduleSteps(40), ScheduleSteps(40)
    for steps in (one, other):
        steps.agree(period)
    for batches in sorted(progress):
        one.taken += one.due(batches)
    other.taken += other.due(max(progress))
    assert one.taken == other.taken == int(min(39, max(progress) + 1e-6)) // period


@pytest.mark.parametrize(
    ("calls", "period"),
    [
        ([], 0),
        ([1], 10),
        ([1, 2, 3, 4], 1),
        ([4, 8], 4),
        ([4], 7),
        ([1, 5, 9], 4),  # if i % 4 == 0
        ([3, 4, 6, 7, 8], 1),  # a scaler skipped some
        ([4, 8, 10], 4),  # what is left at the end
        ([10], 10),
    ],
    ids=str,
)
def test_the_period_is_the_usual_gap(calls: list[int], period: int) -> None:
    steps = ScheduleSteps(40)
    for batch in range(1, 11):
        assert batch not in calls or steps.called()
        steps.batch_done()
    assert steps.report == (len(calls), period)
    assert steps.period == period


def test_a_part_of_a_window_that_is_a_whole_batch_but_for_rounding() -> None:
    steps = ScheduleSteps(40)
    steps.agree(1)
    assert steps.due(3 - 1e-9) == 3
    assert steps.due(2.99) == 2


def test_a_second_call_in_a_batch_is_none() -> None:
    steps = ScheduleSteps(40)
    assert [steps.called(), steps.called()] == [True, False]
    steps.batch_done()
    assert [steps.called(), steps.called()] == [True, False]


def test_the_rank_that_has_called_most_often_knows_the_period() -> None:
    reports = {0: ((3, 4), (0, 0)), 1: ((1, 9), (0, 0)), 2: ((0, 0), (0, 0))}
    assert common_periods(reports) == (4, 0)
    assert common_periods({0: (), 1: ()}) == ()


def test_ranks_that_follow_other_numbers_of_schedulers_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"\{0: 1, 1: 0\} by rank\): call elche\."):
        common_periods({0: ((1, 1),), 1: ()})


def test_what_was_taken_too_many_before_an_early_end_is_passed_over() -> None:
    """Once: a rank whose planned window was broken off stayed ahead for good."""
    steps = ScheduleSteps(100)
    for _ in range(2):
        assert steps.called()
        steps.batch_done()
    steps.taken += steps.due(30.0)
    ahead = steps.ahead(12.0)
    assert (steps.due_at_end(12.0), ahead) == (0, 18)
    later = ScheduleSteps(100, most=5, ahead=ahead)
    later.agree(1)
    assert (later.due(17.0), later.due(20.0), later.due(99.0)) == (0, 2, 5)
    later.taken += later.due(20.0)
    resumed = ScheduleSteps(100, most=3, ahead=2)
    resumed.load_state_dict(later.state_dict())
    assert resumed.due(99.0) == later.due(99.0) == 3
    in_steps = ScheduleSteps(100, ahead=2)
    stepped = []
    for _ in range(4):
        in_steps.called()
        stepped.append(in_steps.is_called_for)
        in_steps.taken += stepped[-1]
        in_steps.batch_done()
    assert stepped == [False, False, True, True]


@pytest.mark.reaches("a commit without an update", "a tail")
@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=30),
    parts=st.lists(st.integers(0, 90), min_size=1, max_size=60),
    epochs=st.integers(1, 4),
)
def test_as_many_updates_as_a_single_process_makes(
    sizes: list[int], parts: list[int], epochs: int
) -> None:
    """However windows cut the epochs; and never ahead of what is committed."""
    due, made, length = DueUpdates(), 0, sum(sizes)
    reach("a tail", len(set(sizes)) > 1)
    for epoch in range(epochs):
        left = length
        for part in (*parts, length):
            more = min(part, left)
            left -= more
            count = due.take(more, len(sizes), length)
            reach("a commit without an update", more > 0 and not count)
            made += count
            done = epoch * length + length - left
            assert made * length <= done * len(sizes) < (made + 1) * length
        assert made == (epoch + 1) * len(sizes)


@pytest.mark.reaches("a copy that is waited for", "an idle rank", "the last window")
@given(
    windows=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    ),
    idle=st.sets(st.integers(0, 2), max_size=2),
)
def test_every_sample_counts_once_for_its_copy(
    windows: list[list[list[int]]], idle: set[int]
) -> None:
    """When every rank that has work knows the copy, or the epoch ends."""
    counted, brought, seen = [0] * 3, [0] * 3, CopySamples()
    for number, samples in enumerate(windows):
        is_last = number == len(windows) - 1
        for each in samples:
            for place, count in enumerate(each):
                counted[place] += count
        ready = seen.closed(dict(enumerate(samples)), idle, is_last=is_last)
        for place, count in enumerate(ready):
            brought[place] += count
        known = min(len(samples[r]) for r in range(3) if r not in idle)
        assert is_last or len(ready) == known
        reach("a copy that is waited for", brought != counted)
        reach("an idle rank", len(idle))
    reach("the last window")
    assert brought == counted
