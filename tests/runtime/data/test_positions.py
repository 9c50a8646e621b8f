"""An epoch that another rank drew, and one that is cut because ranks have died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from elche.coordination.accounts.batch_ranges import BatchSizes, Range
from elche.coordination.accounts.epoch_parts import PartRanges
from elche.coordination.protocol.instructions import EndEpoch
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.epoch_course import EpochCourse
from elche.runtime.data.positions import EpochPositions, check_length, enumerate_batches
from elche.runtime.data.seeds import position_seed


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(length)))


def in_order(data: TensorDataset) -> BatchSampler:
    return BatchSampler(SequentialSampler(data), 4, drop_last=False)


def drawn(loader: DataLoader[Any]) -> EpochPositions:
    keys, sizes = enumerate_batches(loader, 0)
    return EpochPositions(torch.tensor(keys), sizes, 0, None)


DATA = numbers(20)
LOADERS = [
    DataLoader(DATA, 3),
    DataLoader(DATA, 3, shuffle=True, drop_last=True),
    DataLoader(DATA, None),
    DataLoader(DATA, 3, sampler=RandomSampler(DATA, num_samples=7)),
    DataLoader(DATA, 3, sampler=RandomSampler(DATA, replacement=True, num_samples=50)),
    DataLoader(
        DATA,
        batch_sampler=BatchSampler(SubsetRandomSampler([1, 5]), 2, drop_last=False),
    ),
    DataLoader(DATA, batch_sampler=[[0, 1, 2], [3]]),
]


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_fits_the_data_that_it_was_drawn_from(loader: DataLoader[Any]) -> None:
    check_length(loader, drawn(loader))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (DataLoader(numbers(21), 3), DataLoader(DATA, 3)),
        (DataLoader(numbers(19), 3), DataLoader(DATA, 3)),
        (
            DataLoader(numbers(21), batch_sampler=in_order(numbers(21))),
            DataLoader(DATA, batch_sampler=in_order(DATA)),
        ),
    ],
)
def test_another_length_is_refused_with_both_numbers(
    mine: DataLoader[Any], theirs: DataLoader[Any]
) -> None:
    length = len(mine.dataset)  # type: ignore[arg-type]
    with pytest.raises(
        MismatchError,
        match=f"has {length} samples on this rank, .* drew .* with 20, up to index",
    ):
        check_length(mine, drawn(theirs))


@pytest.mark.parametrize("most", [0, 3, 7, 9])
def test_the_first_batches_of_an_epoch_are_its_beginning(most: int) -> None:
    theirs, mine = DataLoader(DATA, 3), DataLoader(numbers(14), 3)
    whole = drawn(theirs)
    if not most:
        with pytest.raises(ConfigError, match="the sampler yields no batch"):
            enumerate_batches(theirs, 0, most)
        return
    keys, sizes = enumerate_batches(theirs, 0, most)
    positions = EpochPositions(torch.tensor(keys), sizes, 0, None, most)
    assert sizes.num_batches == min(most, whole.num_batches)
    for batch in range(sizes.num_batches):
        assert positions.index_batch(batch) == whole.index_batch(batch)
    check_length(theirs, positions)
    if most > 4:
        with pytest.raises(MismatchError, match="has 14 samples on this rank"):
            check_length(mine, positions)


def test_keys_that_are_no_numbers_are_left_to_the_data_set() -> None:
    positions = EpochPositions(["a", "b"], BatchSizes(((2, 1),)), 0, None)
    check_length(DataLoader(DATA, 3), positions)


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
