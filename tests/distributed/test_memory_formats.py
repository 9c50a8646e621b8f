"""Ranks that hold the same parameters in other memory formats: channels last on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.distributed.cases.tasks import difference, state_of, take_step
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
Loader = DataLoader[tuple[torch.Tensor, ...]]


def _made() -> tuple[nn.Module, torch.optim.Optimizer, Loader]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten()
    ).double()
    data = torch.randn(10, 3, 6, 6, dtype=torch.float64), torch.arange(10) % 8
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, DataLoader(TensorDataset(*data), batch_size=4)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> State:
    for _ in range(2):
        for x, y in loader:
            take_step(model, optimizer, x, y)
    return state_of(model)


def alone() -> State:
    """One process, every layer as torch makes it."""
    return _train(*_made())


def channels_last_on_one(policy: str) -> tuple[State, bool]:
    """Rank 1 is channels last; also whether its gradients and parameters still are."""
    model, optimizer, loader = _made()
    is_last = this_place().rank == 1
    if is_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model, optimizer, loader = elche.setup(model, optimizer, loader, policy=policy)
    state = _train(model, optimizer, loader)
    kept = all(p.is_contiguous() != is_last for p in model.parameters() if p.dim() == 4)
    elche.shutdown()
    return state, kept


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_formats_may_differ_between_ranks(ranks2: RankPool, policy: str) -> None:
    (first, kept), (second, also_kept) = ranks2.serve(channels_last_on_one, policy)
    assert kept
    assert also_kept
    assert difference(first, second) == 0.0
    if policy == "sync":
        assert difference(first, alone()) <= 1e-12
