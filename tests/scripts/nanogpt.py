"""A small GPT: counted steps, warm-up and cosine, accumulation, fetch-ahead."""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, Dataset

# elche: import elche

BLOCK, WIDTH, HEADS, VOCABULARY = 32, 32, 4, 128
MAX_STEPS, WARMUP, ACCUMULATION, LR, MIN_LR = 40, 8, 2, 3e-3, 3e-4


class Text(Dataset):
    def __init__(self):
        text = Path(argparse.__file__).read_text()[:24_000]
        self.data = torch.tensor([min(ord(c), VOCABULARY - 1) for c in text])

    def __len__(self):
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, index):
        chunk = self.data[index * BLOCK : (index + 1) * BLOCK + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.ln_1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(step):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    ratio = (step - WARMUP) / (MAX_STEPS - WARMUP)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * ratio)) * (LR - MIN_LR)


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(1337)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
loader = DataLoader(Text(), batch_size=12, shuffle=True)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
batches = endless(loader)
x, y = next(batches)
for step in range(MAX_STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _micro in range(ACCUMULATION):
        loss = model(x, y) / ACCUMULATION
        samples += len(x)
        x, y = next(batches)  # fetched while the device computes
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
save(model, optimizer.param_groups[0]["lr"], samples)
