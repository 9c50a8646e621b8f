"""A torchrun script as people have it; only the import tells which wrapper it uses."""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if sys.argv[1] == "elche":
    from elche import DistributedDataParallel as DDP  # noqa: N817
else:
    from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


def main() -> None:
    dist.init_process_group("gloo")
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
        with open(os.environ["OUT"], "w", encoding="utf-8") as out:
            out.write(line)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # torch's wrapper may abort if it outlives its group
