"""A torchrun script as people have it, under elche's wrapper and under torch's."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elche import DistributedDataParallel as ElcheDDP


def train(DDP: Any, out_path: str) -> None:  # noqa: N803 - as scripts call it
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 5), torch.randint(3, (48,)))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            context = torch.enable_grad() if last else model.no_sync()
            with context:
                nn.functional.cross_entropy(model(x), y).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
    if dist.get_rank() == 0:
        total = sum(float(v.double().abs().sum()) for v in model.state_dict().values())
        keys = " ".join(model.state_dict())
        line = f"loss {loss.item():.5f} state {total:.4f} keys {keys}"
        with open(out_path, "w", encoding="utf-8") as out:
            out.write(line)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks.item() == dist.get_world_size()
    train(ElcheDDP, os.path.join(sys.argv[1], "elche"))
    train(TorchDDP, os.path.join(sys.argv[1], "torch"))
    dist.destroy_process_group()  # torch's wrapper may abort if it outlives its group
