"""What batches weigh is asked on the host, before they are moved."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elche.coordination.ledger import BatchSizes
from elche.errors import ConfigError
from elche.runtime.batch_weights import BatchWeights
from elche.runtime.leased_batches import LeasedBatches
from elche.runtime.positions import EpochPositions

ELSEWHERE = torch.device("meta")


def leased(weight_of: Any) -> tuple[LeasedBatches, EpochPositions]:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    weights = None if weight_of is None else BatchWeights(weight_of, 3)
    batches = LeasedBatches(loader, torch.Generator(), ELSEWHERE, lambda: None, weights)
    positions = EpochPositions(torch.arange(6), BatchSizes(((2, 3),)), 4, None)
    batches.start(positions)
    return batches, positions


def test_each_batch_comes_out_with_its_weight() -> None:
    seen: deque[torch.device] = deque()

    def weight_of(batch: Any) -> torch.Tensor:
        seen.append(batch[0].device)
        total: torch.Tensor = batch[0].sum()
        return total

    batches, positions = leased(weight_of)
    for number in (0, 2):
        batches.push(number, positions.index_batch(number))
    batches.end()
    taken = [(batches.take(), batches.weight) for _ in range(2)]
    assert [got[0] for got, _ in taken if got is not None] == [0, 2]
    assert [weight for _, weight in taken] == [1.0, 9.0]
    assert all(got is not None and got[1][0].device == ELSEWHERE for got, _ in taken)
    assert set(seen) == {torch.device("cpu")}
    assert batches.take() is None
    batches.finish()


def test_what_is_no_weight_names_rank_batch_and_epoch() -> None:
    batches, positions = leased(lambda batch: -2 * batch[0].sum())
    batches.push(1, positions.index_batch(1))
    expected = r"rank 3: weight_of gave tensor\(-10.\) for batch 1 of epoch 4"
    with pytest.raises(ConfigError, match=expected):
        batches.take()
    batches.finish()


def test_without_a_function_there_is_no_weight() -> None:
    batches, positions = leased(None)
    batches.push(0, positions.index_batch(0))
    assert batches.take() is not None
    assert batches.weight is None
    batches.finish()
