"""What each rank takes of a checkpoint: its own, rank 0's, or nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elche.checkpoint.capture import random_state, restore_random
from elche.checkpoint.contents import Contents
from elche.checkpoint.store import CheckpointStore
from elche.checkpoint.writer import CheckpointWriter
from elche.runtime.training import RunParts


def contents(rank: int, residual: float) -> Contents:
    """Those of a rank whose averaging has left something out of its messages."""
    model = nn.Linear(2, 1)
    groups = [{"momentum": None, "base": None, "residual": torch.tensor([residual])}]
    parts = RunParts(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), 0.1)],
        copies=[],
        generators={"feed": torch.Generator()},
        is_common=False,
        state={"averaging": {"version": 1, "groups": groups}},
        epochs={"next": 1, "schedules": []},
    )
    return Contents(rank=rank, parts=parts, schedulers=[], registered={})


@pytest.fixture
def of_two(tmp_path: Path) -> Any:
    """A checkpoint of two ranks with other residuals and random states."""
    store = CheckpointStore(tmp_path)
    for rank in (1, 0):
        torch.manual_seed(rank)
        writer = CheckpointWriter(store, rank, 2, "run", 60.0)
        writer.begin("checkpoint-00000001", contents(rank, 1.0 + rank).capture({}), {})
        writer.close(60.0)
    return store.newest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_there_goes_on_with_its_own(of_two: Any, rank: int) -> None:
    averaging = contents(rank, 0.0).load(of_two)["run"]["averaging"]
    assert averaging["groups"][0]["residual"] == 1.0 + rank
    assert torch.initial_seed() == rank


def test_a_rank_that_was_not_there_draws_and_leaves_out_its_own(of_two: Any) -> None:
    torch.manual_seed(7)
    averaging = contents(2, 0.0).load(of_two)["run"]["averaging"]
    assert averaging["groups"][0]["residual"] is None
    assert torch.initial_seed() == 7


def test_the_second_of_a_pair_of_normal_numbers_is_kept() -> None:
    random.gauss(0.0, 1.0)
    state = random_state({})
    expected = [random.gauss(0.0, 1.0) for _ in range(3)]
    restore_random(state, {})
    assert [random.gauss(0.0, 1.0) for _ in range(3)] == expected
