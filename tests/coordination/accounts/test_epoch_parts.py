"""Epochs that are cut again and again: every position in one part, every step once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import (
    BatchCut,
    BatchSizes,
    Range,
    joined,
    without,
)
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.epoch_parts import EpochRest, PartRanges, whole_end
from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.instructions import EndEpoch

sizes_of_epochs = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(
    BatchSizes.of
)


@st.composite
def ranges_in(draw: st.DrawFn, length: int) -> list[Range]:
    """Ascending ranges of what is left of so many positions."""
    kept = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return joined((at, at + 1) for at, keep in enumerate(kept) if keep)


@given(st.data(), sizes_of_epochs, st.integers(1, 3))
def test_every_position_is_trained_on_in_one_part(
    data: st.DataObject, sizes: BatchSizes, parts: int
) -> None:
    left = PartRanges(((0, sizes.num_samples),))
    done: list[int] = []
    for _ in range(4):
        own = left.sizes_in(sizes).cut_by(BatchCut(parts=parts))
        assert own.num_samples == left.num_positions
        batches = [
            list(range(own.position_of(b), own.position_of(b) + own.run_of(b)[0]))
            for b in range(own.num_batches)
        ]
        whole = [at for start, stop in left.ranges for at in range(start, stop)]
        origins = [[whole[at] for at in batch] for batch in batches]
        for batch in origins:  # a batch is of one global batch, and of one range
            first = sizes.batches_in(batch[0])
            assert batch == list(range(batch[0], batch[0] + len(batch)))
            assert int(first + 1e-9) == int(sizes.batches_in(batch[-1]) + 1e-9)
        rest = data.draw(ranges_in(left.num_positions))
        is_left = {at for start, stop in rest for at in range(start, stop)}
        every = [at for batch in batches for at in batch]
        done += [whole[at] for at in every if at not in is_left]
        left = left.origins_of(rest)
    done += [at for start, stop in left.ranges for at in range(start, stop)]
    assert sorted(done) == list(range(sizes.num_samples))


@given(st.data(), sizes_of_epochs)
def test_what_ranks_that_died_give_back_goes_to_the_last_batches(
    data: st.DataObject, sizes: BatchSizes
) -> None:
    steps = data.draw(st.integers(1, sizes.num_batches))
    first = sizes.num_batches - steps
    last = [sizes.run_of(at)[0] for at in range(first, sizes.num_batches)]
    back = data.draw(st.integers(0, sizes.num_samples - sum(last)))
    start = sizes.num_samples - sum(last)
    part = PartRanges(((0, back), (start, sizes.num_samples)))
    found = part.steps_in(sizes, steps)
    own = [found.run_of(at)[0] for at in range(found.num_batches)]
    more = [size - was for size, was in zip(own, last, strict=True)]
    assert sum(more) == back
    assert more == sorted(more)
    assert max(more) - min(more) <= 1


@given(sizes_of_epochs, st.integers(1, 12), st.integers(1, 40))
def test_a_part_of_any_other_kind_has_equal_batches(
    sizes: BatchSizes, steps: int, positions: int
) -> None:
    found = PartRanges(((0, positions),)).steps_in(sizes, steps)
    assert found.num_samples == positions
    assert found.num_batches == min(steps, positions)


def test_the_parts_of_an_epoch_count_together() -> None:
    part = EndEpoch(rank=0, epoch=3, samples=6, sync_s=0.25, windows=2, anchor=5)
    whole = whole_end([part, part, part])
    assert (whole.samples, whole.windows, whole.anchor) == (18, 6, 5)
    assert whole.sync_s == pytest.approx(0.75)
    assert whole_end([part]) == part


@given(sizes_of_epochs, st.data())
def test_samples_fill_batches_in_order(sizes: BatchSizes, data: st.DataObject) -> None:
    batch = data.draw(st.integers(0, sizes.num_batches - 1))
    before, size = sizes.samples_in(0, batch), sizes.run_of(batch)[0]
    assert sizes.batches_in(before) == batch
    part = data.draw(st.floats(0.0, 1.0))
    assert abs(sizes.batches_in(before + part * size) - (batch + part)) < 1e-9
    assert sizes.batches_in(sizes.num_samples + 5.0) == sizes.num_batches
    assert sizes.batches_in(-3.0) == 0.0


@given(sizes_of_epochs, st.integers(0, 60))
def test_whole_epochs_and_a_cut_one_make_the_steps(sizes: BatchSizes, n: int) -> None:
    count, taken = StepCount(), 0
    while left := count.left(n):
        cut = BatchSizes.of(
            [sizes.run_of(batch)[0] for batch in range(sizes.num_batches)][:left]
        )
        count.begin_epoch(cut)
        assert count.of_epoch == cut.num_batches
        taken += cut.num_batches
        assert count.at(0) < count.at(1) <= count.at(cut.num_samples) == taken
        count.end_epoch(0, is_early=False)  # all was discarded: it is done all the same
        assert count.at(0) == count.before == taken
    assert taken == n


@given(sizes_of_epochs, st.integers(1, 60), st.lists(st.floats(0.0, 1.0), max_size=5))
def test_early_ends_count_what_was_trained(
    sizes: BatchSizes, n: int, parts: list[float]
) -> None:
    count, trained = StepCount(), 0.0
    for part in parts:
        samples = round(part * sizes.num_samples)
        count.begin_epoch(sizes)
        count.end_epoch(samples, is_early=True)
        trained += sizes.batches_in(samples)
    assert abs(count.before - trained) < 1e-9
    assert max(0.0, n - trained) <= count.left(n) + 1e-6
    assert count.left(n) < max(0.0, n - trained) + 1.0


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_a_lost_rank_closed_is_pooled_again_once(is_staged: bool) -> None:
    ledger = EpochLedger(BatchSizes(((4, 8),)), (0, 1))
    for rank in (0, 1):
        ledger.train(rank, *ledger.lease(rank, 2))
        ledger.close(rank)
    assert not is_staged or ledger.stage() == 16
    ledger.remove(1)
    assert ledger.unstage_gone() == ({1: 8} if is_staged else {})
    ledger.commit()
    ledger.check()
    assert (ledger.pooled, ledger.used_samples) == (6, 8)


def test_a_range_loses_what_others_have_of_it() -> None:
    assert without([(5, 10)], [(0, 2), (6, 7), (9, 12)]) == [(5, 6), (7, 9)]


def test_a_batch_that_is_moved_to_the_device_is_not_waited_for() -> None:
    cost = BatchCost.measured(8, (1.0, 4.0, 9.0), 2.0, 0.5)
    assert (cost.busy_s, cost.data_wait_s, cost.transfer_s) == (7.5, 1.0, 2.0)


def test_steps_counted_after_a_death_are_kept_by_later_cuts() -> None:
    """Of three steps left for twelve positions, a cut after one leaves two."""
    rest = EpochRest(BatchSizes.of([3] * 6), PartRanges(((6, 18),)), steps=3)
    assert rest.part_sizes.runs == ((4, 3),)
    cut = {"samples": 4, "sync_s": 0.0, "windows": 0, "anchor": 1, "left": ((4, 12),)}
    end = EndEpoch(rank=0, epoch=0, **cut)  # type: ignore[arg-type]
    assert rest.after(end).part_sizes.runs == ((4, 2),)
