"""Tokens per second of a pipeline with caches of keys and values, and without.

    elche run --nproc 2 benchmarks/generation.py --prompt 128 --tokens 64
    elche run --nproc 2 benchmarks/generation.py --model gpt2 --sequences 4

Both ways generate the same tokens, in turn, after a call that is not timed, in which
the caches are compared with whole runs. One thread per rank. Prints tokens per second
of each, and the ratio within each of the `--repetitions`. The model "plain" is written
out here, as layers that take `cache=`; "gpt2" is that of transformers, as it comes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.pipeline import Pipeline

VOCABULARY, HEADS = 1000, 8
Cache = dict[str, Any]


class Embed(nn.Module):
    """Tokens and their positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Tokens [sequences, length] to vectors."""
        begin = 0 if cache is None else cache.get("length", 0)
        end = begin + tokens.shape[1]
        if cache is not None:
            cache["length"] = end
        found: torch.Tensor = self.tokens(tokens)
        return found + self.positions(torch.arange(begin, end, device=tokens.device))


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Vectors of new positions to such vectors; `cache` has those before."""
        shape = (*x.shape[:2], 3, HEADS, x.shape[2] // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


def make_model(asked: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A model, and what a pipeline needs to take it."""
    torch.manual_seed(0)
    width, length = asked.width, asked.prompt + asked.tokens
    if asked.model == "plain":
        blocks = [Block(width) for _ in range(asked.layers)]
        return [Embed(width, length), *blocks, nn.Linear(width, VOCABULARY)], {}
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=asked.layers,
        n_embd=width,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=length,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return GPT2LMHeadModel(config), {"sample": {"input_ids": ids, "use_cache": False}}


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each repetition, on every rank."""
    model, options = make_model(asked)
    micro_batches = min(asked.sequences, asked.micro_batches)
    rows = []
    with Pipeline(
        model, F.mse_loss, micro_batches=micro_batches, schedule="1f1b", **options
    ) as pipe:
        generator = torch.Generator().manual_seed(1)
        shape = (asked.sequences, asked.prompt)
        prompt = torch.randint(VOCABULARY, shape, generator=generator)
        pipe.generate(prompt, max_new_tokens=3)
        for number in range(asked.repetitions):
            took_s, made = {}, []
            order = (True, False) if number % 2 == 0 else (False, True)
            for cached in order:
                began_s = time.perf_counter()
                made.append(
                    pipe.generate(prompt, max_new_tokens=asked.tokens, use_cache=cached)
                )
                took_s[cached] = time.perf_counter() - began_s
            tokens = asked.sequences * asked.tokens
            rows.append(
                {
                    "rank": pipe.rank,
                    "cached_tokens_per_s": tokens / took_s[True],
                    "whole_tokens_per_s": tokens / took_s[False],
                    "ratio": took_s[False] / took_s[True],
                    "equal": bool(torch.equal(*made)),
                }
            )
    return rows


def main() -> None:
    """Measures and prints, on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("plain", "gpt2"), default="plain")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(asked)
    if rows[0]["rank"] != 0:
        return
    for row in rows:
        print(
            f"{asked.model}: {row['cached_tokens_per_s']:.1f} tokens/s with caches, "
            f"{row['whole_tokens_per_s']:.1f} without: {row['ratio']:.2f} times; the "
            f"same tokens: {row['equal']}",
            flush=True,
        )
    print(f"median {median(row['ratio'] for row in rows):.2f} times", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
