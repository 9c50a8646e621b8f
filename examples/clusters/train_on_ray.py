"""Ranks with and without a GPU on a cluster of Ray train one model, with checkpoints.

ray start --head                                      on one machine; its address is
ray start --address=10.0.0.1:6379                     for each of the others
python examples/clusters/train_on_ray.py --gpus 1 --cpus 2

A rank or a machine may die meanwhile. After the end of the head node the same command
with `--folder`, which all machines see, continues from the newest checkpoint there.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche.ray
from elche.ray import RankSpec


def train(epochs: int) -> dict[str, Any]:
    """Runs on each rank; what rank 0 returns comes back to the driver."""
    torch.manual_seed(0)
    x = torch.randn(2000, 16)
    data = TensorDataset(x, x.abs().argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for epoch in elche.epochs(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if elche.is_main_process():
            print(
                f"epoch {epoch}: loss {loss.item():.3f} on {elche.world_size()} ranks"
            )
    return {name: value.cpu() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=0, help="ranks with a GPU each")
    parser.add_argument("--cpus", type=int, default=2, help="ranks with a CPU each")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", help="for checkpoints; all machines see it")
    chosen = parser.parse_args()
    with_gpu = RankSpec(resources={"GPU": 1, "CPU": 1})
    without = RankSpec(resources={"CPU": 1})
    state = elche.ray.run(
        train,
        chosen.gpus * [with_gpu] + chosen.cpus * [without],
        args=(chosen.epochs,),
        checkpoint_dir=chosen.folder,
        checkpoint_every=60 if chosen.folder else None,
        resume=chosen.folder is not None,
    )
    torch.save(state, "model.pt")
    print("the trained model is in model.pt")
