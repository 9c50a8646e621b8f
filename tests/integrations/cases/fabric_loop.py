"""A loop on Fabric, and one of elche's own over torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elche
import elche.integrations.fabric

warnings.filterwarnings("ignore")
torch.manual_seed(3)
X = torch.randn(90, 6)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def stateful_loader() -> Any:
    shuffle = torch.Generator().manual_seed(4)
    return StatefulDataLoader(DATA, batch_size=16, shuffle=True, generator=shuffle)


def figures(name: str, steps: int, losses: list[float], model: nn.Module) -> None:
    total = float(sum(p.abs().sum() for p in model.parameters()))
    lines = [f"{name} steps {elche.rank()} {steps}"]
    if elche.rank() == 0:
        values = " ".join(f"{value:.6f}" for value in [*losses, total])
        lines.append(f"{name} figures {values}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def on_fabric(strategy: str) -> None:
    torch.manual_seed(5)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(stateful_loader())
    steps, losses = 0, []
    with tempfile.TemporaryDirectory() as folder:
        folder = fabric.broadcast(folder)
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                fabric.backward(nn.functional.mse_loss(model(x), y))
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                steps += 1
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(model(X), DATA[:][1])))
        saved = copy.deepcopy(model.state_dict())
        fabric.save(f"{folder}/model.pt", {"model": model})
        with torch.no_grad():
            next(model.parameters()).zero_()
        fabric.barrier()
        fabric.load(f"{folder}/model.pt", {"model": model})
        fabric.barrier()
    for name, value in model.state_dict().items():
        assert value.equal(saved[name]), name
    assert fabric.all_gather(torch.tensor(steps)).flatten().tolist() == (
        [steps] * elche.world_size()
    )
    figures("fabric", steps, losses, model)


def on_a_stateful_loader() -> None:
    torch.manual_seed(5)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    user, steps = stateful_loader(), 0
    model, optimizer, loader = elche.setup(model, optimizer, user)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            steps += 1
    if elche.world_size() == 1:
        assert loader.state_dict() == user.state_dict()
    else:
        refused(loader.state_dict)
        refused(lambda: loader.load_state_dict({}))
    figures("torchdata", steps, [], model)
    if elche.world_size() > 1:
        resumed = stateful_loader()
        resumed.load_state_dict({"anything": 0})
        refused(lambda: elche.setup(model, optimizer, resumed))


def refused(call: Any) -> None:
    with pytest.raises(elche.ConfigError, match=r"elche.state_dict\(\) between epochs"):
        call()


if __name__ == "__main__":
    on_fabric(sys.argv[1])
    on_a_stateful_loader()
