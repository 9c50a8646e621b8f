"""Compiled models under shares of several sizes: compiled once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.harness.rank_pool import RankPool

BATCH, SAMPLES = 12, 40


def compiled_run(how: str) -> tuple[int, set[int]]:
    """Graphs of a model compiled before or after `elche.setup`, and batch sizes."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    if how == "before":
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)
    loader = DataLoader(data, batch_size=BATCH)
    hints = (0.6, 0.4)
    model, optimizer, loader = elche.setup(model, optimizer, loader, speed_hints=hints)
    if how == "after":
        model = torch.compile(model, backend=backend)
    sizes = set()
    for _ in range(2):
        for x, y in loader:
            sizes.add(len(x))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    elche.shutdown()
    return len(graphs), sizes


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["before", "after"])
def test_shares_of_several_sizes_are_compiled_for_at_once(
    ranks2: RankPool, how: str
) -> None:
    """Made after `elche.setup` it is unknown, and Dynamo sees at the second size."""
    found = ranks2.serve(
        compiled_run, how, env=[{"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "0.1"}] * 2
    )
    for graphs, sizes in found:
        assert len(sizes - {1}) >= 2
        # Dynamo compiles for a batch of one apart, whatever it is told.
        assert graphs <= (2 if how == "after" else 1) + (1 in sizes)
