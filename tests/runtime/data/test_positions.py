"""An epoch that another rank drew is checked against this rank's data set."""

from __future__ import annotations

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

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.positions import EpochPositions, check_length, enumerate_batches


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
