"""An epoch whose rest is cut anew because ranks have died."""

from __future__ import annotations

from collections.abc import Sequence

from elche.coordination.accounts.batch_ranges import BatchSizes, Range
from elche.coordination.accounts.epoch_parts import PartRanges
from elche.coordination.protocol.instructions import EndEpoch
from elche.runtime.data.epoch_course import EpochCourse
from elche.runtime.data.positions import EpochPositions
from elche.runtime.data.seeds import position_seed


def ended(left: Sequence[Range], steps: int = 0) -> EndEpoch:
    return EndEpoch(
        rank=0,
        epoch=4,
        samples=1,
        sync_s=0.0,
        windows=0,
        anchor=1,
        left=tuple(left),
        steps=steps,
    )


def batches_of(positions: EpochPositions) -> list[list[int]]:
    """The keys of each batch; each sample has its position's own seed."""
    found = []
    for number in range(positions.num_batches):
        batch = positions.index_batch(number)
        assert batch.seeds is not None
        seeds = [position_seed(7, 4, key - 100) for key in batch.keys]
        assert list(batch.seeds) == seeds
        found.append(list(batch.keys))
    return found


def test_positions_move_up_and_the_number_of_batches_stays() -> None:
    sizes, keys = BatchSizes.of([4] * 6), list(range(100, 124))
    course = EpochCourse(4, keys, sizes, PartRanges(((0, 24),)), 0, None)
    course.ended(ended([(5, 7), (8, 24)], steps=4))  # of step 1 two are missing
    expected = [[105, 106, 108, 109], [*range(110, 114)]]
    expected += [[*range(114, 119)], [*range(119, 124)]]
    assert batches_of(course.positions(7)) == expected
    course.ended(ended([(4, 18)]))  # a checkpoint in it, after one batch
    assert batches_of(course.positions(7)) == expected[1:]
    course = EpochCourse.from_state(course.state_dict(0))  # a newcomer, or resumed
    assert batches_of(course.positions(7)) == expected[1:]
    course.ended(ended([(4, 6), (9, 14)], steps=1))
    assert batches_of(course.positions(7)) == [[114, 115, *range(119, 124)]]
    course.ended(ended([]))
    assert course.is_over


def test_what_a_dead_rank_had_of_an_open_batch_is_left_once() -> None:
    sizes, keys = BatchSizes.of([4] * 6), list(range(100, 124))
    course = EpochCourse(4, keys, sizes, PartRanges(((0, 24),)), 0, None)
    course.ended(ended([(6, 7), (8, 24)], steps=4), open_batch=[(4, 8)])
    assert course.open_samples == 3
    resumed = EpochCourse.from_state(course.state_dict(7))
    assert resumed.samples_before == -4
    batches = batches_of(resumed.positions(7))
    assert [key for batch in batches for key in batch] == list(range(104, 124))
    assert len(batches) == 5
