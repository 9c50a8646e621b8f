"""nanoGPT's loop, with its `get_batch` and a smaller model, divided by `elche.share`.

python examples/by_share/nanogpt.py                             one device
elche run --speeds 1,0.25 examples/by_share/nanogpt.py          one four times slower
torchrun --nproc-per-node 2 examples/by_share/nanogpt.py        torchrun works too

Every rank draws the same 64 positions of the text and trains on its part of them.
"""

import argparse
import inspect
import os

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import elche

BLOCK, BATCH = 8, 64
text = inspect.getsource(argparse)
letters = sorted(set(text))
data = torch.tensor([letters.index(each) for each in text])
device = elche.device()


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch: letters, and the letter that follows them."""
    drawn = torch.randint(len(data) - BLOCK, (BATCH,))[elche.share(BATCH)]
    windows = [data[at : at + BLOCK + 1] for at in drawn.tolist()]
    both = torch.stack(windows).to(device)
    return both[:, :-1], both[:, -1]


torch.manual_seed(1337)  # the same on every rank: all draw the same positions
model = nn.Sequential(
    nn.Embedding(len(letters), 16),
    nn.Flatten(),
    nn.Linear(16 * BLOCK, 64),
    nn.GELU(),
    nn.Linear(64, len(letters)),
).to(device)
is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if is_distributed:
    dist.init_process_group("gloo")
    model = elche.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(61):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} rank {elche.rank()}: {len(x)} samples, loss {loss:.3f}")
if is_distributed:
    dist.destroy_process_group()
