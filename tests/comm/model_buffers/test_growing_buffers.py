"""A cache that grows with the longest sequence is each rank's own, under any policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
FEATURES = 4


class Sequences(Dataset[tuple[torch.Tensor, int]]):
    """Sequences of 1 to 11 vectors."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        length = 1 + (index * 7) % 11
        return torch.randn(length, FEATURES, generator=generator), index % 3


class Rotary(nn.Module):
    """Statistics, which are averaged, before and after a cache that grows."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(FEATURES)
        self.register_buffer("cache", torch.ones(1, FEATURES), persistent=False)
        self.last = nn.BatchNorm1d(FEATURES)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > len(self.cache):
            angles = torch.arange(float(length * FEATURES)).view(length, FEATURES)
            self.register_buffer("cache", angles.cos(), persistent=False)
        turned = (self.first(x.mean(1))[:, None] * self.cache[:length]).mean(1)
        out: torch.Tensor = self.out(self.last(turned))
        return out


def _together(items: Any) -> tuple[torch.Tensor, torch.Tensor]:
    vectors = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return vectors, torch.tensor([y for _, y in items])


def train(options: dict[str, Any]) -> State:
    """Two epochs in which each rank's cache follows its own batches."""
    torch.manual_seed(2)
    model: nn.Module = Rotary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(Sequences(), batch_size=6, collate_fn=_together)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    elche.shutdown()
    return state


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"policy": "cadence"},
        {"policy": "cadence", "update": "gradients"},
        {"policy": "async"},
    ],
    ids=str,
)
def test_what_else_is_averaged_stays_equal(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    states = ranks2.run(train, options, case_setup=serve_in_thread)
    assert identical(states)
    assert "cache" not in states[0]
    for norm in ("first", "last"):
        assert bool(states[0][f"{norm}.running_mean"].any())
