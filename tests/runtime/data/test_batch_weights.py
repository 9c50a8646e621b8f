"""What batches weigh is asked on the host, before they are moved."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.data.leased_data import LeasedBatches
from elche.runtime.data.positions import EpochPositions

ELSEWHERE = torch.device("meta")


def test_each_batch_comes_out_with_its_weight() -> None:
    seen: deque[torch.device] = deque()

    def weight_of(batch: Any) -> torch.Tensor:
        seen.append(batch[0].device)
        total: torch.Tensor = batch[0].sum()
        return total

    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    weights = BatchWeights(weight_of, 3)
    batches = LeasedBatches(loader, torch.Generator(), ELSEWHERE, lambda: None, weights)
    positions = EpochPositions(torch.arange(6), BatchSizes(((2, 3),)), 4, None)
    batches.start(positions)
    for number in (0, 2):
        batches.push(number, positions.index_batch(number))
    batches.end()
    taken = [(batches.take(), batches.weight) for _ in range(2)]
    assert [got[0] for got, _ in taken if got is not None] == [0, 2]
    assert [weight for _, weight in taken] == [1.0, 9.0]
    assert all(got is not None and got[1][0].device == ELSEWHERE for got, _ in taken)
    assert set(seen) == {torch.device("cpu")}
    assert batches.take() is None
    batches.finish(is_over=True)


@pytest.mark.parametrize(
    "said",
    [
        3,
        3.0,
        torch.tensor(3),
        torch.tensor([3.0]),
        torch.tensor(3.0, requires_grad=True),
        np.float32(3),
        np.int64(3),
        np.array(3),
        np.array([3.0]),
    ],
    ids=repr,
)
def test_one_number_of_any_kind(said: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BatchWeights(lambda _: said, 0).of(None, "a batch") == 3.0


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("4", "'4'"),
        (torch.tensor(float("nan")), r"tensor\(nan\)"),
        (np.zeros(2), r"an array of shape \[2\]"),
        (np.array("3"), r"array\('3'.*\)"),
        (np.array(3j), r"array\(0.\+3.j\)"),
        (torch.tensor(-1.0, requires_grad=True), r"tensor\(-1., requires_grad=True\)"),
    ],
)
def test_what_is_not_one_number_is_shown(said: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"weight_of gave {shown} for a batch; exp"):
        BatchWeights(lambda _: said, 0).of(None, "a batch")


@pytest.mark.parametrize(
    ("weight_of", "said"),
    [
        (lambda: 1.0, r"got one whose arguments are \(\): too many"),
        (lambda x, y: 1.0, r"arguments are \(x, y\): missing a required argument: 'y'"),
        (lambda *, batch: 1.0, r"arguments are \(\*, batch\): "),
        (16, "a function of a batch that returns what it weighs, got 16"),
    ],
)
def test_what_takes_no_batch_is_refused_at_once(weight_of: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchWeights(weight_of, 0)


@pytest.mark.parametrize(
    ("batch", "failed", "what"),
    [
        ({"x": 1, "y": 2}, "KeyError: 'labels'", "a dict of 'x', 'y'"),
        ([torch.ones(2), 3], "TypeError: list ", "a list of Tensor, int"),
        (torch.ones(2, 3), "IndexError: ", "of type Tensor"),
    ],
)
def test_a_function_that_fails_is_named(batch: Any, failed: str, what: str) -> None:
    weights = BatchWeights(lambda batch: batch["labels"].sum(), 2)
    said = f"rank 2: weight_of failed for batch 0 of epoch 1, which is {what}: {failed}"
    with pytest.raises(ConfigError, match=said):
        weights.of(batch, "batch 0 of epoch 1")
