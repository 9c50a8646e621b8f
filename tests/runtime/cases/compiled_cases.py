"""What ranks run whose model is compiled, by a backend that counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

BATCH, SAMPLES = 12, 40


def compiled_run(how: str, shares: str) -> tuple[int, set[int]]:
    """Graphs that were compiled, and the sizes of batches.

    Args:
        how: "before" or "after" `elche.setup`, or by the model's "method".
        shares: as in `elche.RunConfig`.
    """
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    if how == "before":
        model = torch.compile(model, backend=backend)
    elif how == "method":
        model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)
    options = {"shares": shares, "speed_hints": (0.6, 0.4)}
    model, optimizer, loader = elche.setup(
        model, optimizer, DataLoader(data, batch_size=BATCH), **options
    )
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
