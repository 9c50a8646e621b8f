"""Data that change, are missing or cannot be read: a named error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.session.process import current_run, failing_together
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed
NEW_RANKS = True


class Changing(Dataset[Any]):
    """Numbers, as many as it is told."""

    def __init__(self, length: int, is_broken: bool) -> None:
        self.length = length
        self.is_broken = is_broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_broken:
            raise OSError(f"sample {index} cannot be read")
        if index >= self.length:
            raise IndexError(index)
        return torch.tensor([float(index)])


def _train(
    policy: str,
    *,
    ranks: tuple[int, ...] = (),
    length: int = 32,
    broken: bool = False,
    num_workers: int = 0,
    drop_last: bool = False,
) -> list[list[int]]:
    """Two epochs; between them the data of these ranks change their length."""
    data = Changing(32, broken and elche.rank() in ranks)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    loader = DataLoader(data, 4, num_workers=num_workers, drop_last=drop_last)
    seen: list[list[int]] = []
    with failing_together():
        model, optimizer, ours = elche.setup(model, optimizer, loader, policy=policy)
        for _ in range(2):
            seen.append([])
            for batch in ours:
                run = current_run()
                if run is not None and run.current_samples:
                    seen[-1] += batch[:, 0].int().tolist()
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if elche.rank() in ranks:
                data.length = length
    elche.shutdown()
    return seen


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_data_may_grow_between_epochs_on_every_rank(
    ranks2: RankPool, policy: str
) -> None:
    seen = ranks2.run(
        _train, policy, ranks=(0, 1), length=41, case_setup=serve_in_thread
    )
    assert sorted(seen[0][0] + seen[1][0]) == list(range(32))
    assert sorted(seen[0][1] + seen[1][1]) == list(range(41))


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"ranks": (1,), "length": 41}, "the data set has 41 samples on this rank"),
    (
        {"ranks": (0,), "length": 20},
        "rank 0 drew epoch 1 with 20, up to index 19",
    ),
    (
        {"ranks": (1,), "length": 31, "drop_last": True},
        "the data set has 31 samples on this rank",
    ),
    ({"ranks": (1,), "broken": True}, "cannot be read"),
]


@pytest.mark.parametrize(
    ("policy", "fault", "says"),
    [(policy, *fault) for policy in ("sync", "cadence") for fault in FAULTS],
)
def test_faults_are_named_on_every_rank(
    ranks2: RankPool, policy: str, fault: dict[str, Any], says: str
) -> None:
    """Where it happened the error is the fault's own; the others name that rank."""
    outcomes = ranks2.run(
        _train, policy, **fault, case_setup=serve_in_thread, expect_failure=True
    )
    errors = [str(outcome.error) for outcome in outcomes]
    assert all(says in error for error in errors), errors
    own = [error for error in errors if "RemoteRankError" not in error]
    assert len(own) == 1, errors
