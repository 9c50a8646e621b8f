"""A small GPT on real text, cut into stages: the same loss on any number of ranks.

python examples/pipeline.py                              one process holds all layers
elche run --nproc 4 examples/pipeline.py                 two stages on each of four
elche run --nproc 4 examples/pipeline.py --replicas 2    two pipelines of two ranks
elche run --devices cuda:0,cpu examples/pipeline.py      a GPU and the CPU
elche run --speeds 1,0.25 examples/pipeline.py --measure  layers by measured speed
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from elche.demo.text import VOCABULARY_SIZE, load_corpus
from elche.pipeline import Pipeline

WIDTH, HEADS, LENGTH, BATCH, STEPS = 64, 4, 64, 16, 30


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        """Tokens [samples, length] to activations [samples, length, width]."""
        return self.tokens(x) + self.positions(torch.arange(LENGTH, device=x.device))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Activations to activations."""
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loss_fn(logits, target):
    """Mean over the characters of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def draw(text, generator):
    """A batch of passages, and the characters that follow."""
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=1, help="each trains on its share")
parser.add_argument("--measure", action="store_true", help="share layers by speed")
options = parser.parse_args()
replicas = options.replicas

# Factories: a rank builds the layers of its own stages, and no others.
layers = [
    Embedding,
    *[Block] * 6,
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY_SIZE)),
]
corpus = load_corpus(max_chars=400_000)
generator = torch.Generator().manual_seed(0)

with Pipeline(
    layers,
    loss_fn,
    micro_batches=8 // replicas,
    seed=0,
    replicas=replicas,
    split_batches=True,
    costs="measure" if options.measure else None,
    sample=torch.zeros(BATCH // 8, LENGTH, dtype=torch.long),
) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(STEPS):
        x, y = draw(corpus.train, generator)
        loss = pipe.step(x, y).loss
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        if pipe.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss:.4f}")
    x, y = draw(corpus.held_out, generator)
    held_out = pipe.evaluate(x, y).loss
    if pipe.rank == 0:
        schedule = pipe.schedule
        stages = f"{list(pipe.partition)} layers on ranks {list(schedule.placement)}"
        print(f"{schedule.name}, {stages}: held-out loss {held_out:.4f}")
