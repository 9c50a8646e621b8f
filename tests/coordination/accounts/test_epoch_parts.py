"""Epochs that are cut again and again: every position in one part, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes, Range, joined
from elche.coordination.accounts.epoch_parts import PartRanges, whole_end
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
