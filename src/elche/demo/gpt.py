"""The demo's GPT: small enough for a CPU core, large enough to communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        vocabulary: number of symbols.
        context: maximum number of symbols in a sequence.
        width: features of a position; a multiple of `heads`.
        heads: attention heads.
        layers: transformer blocks.
        ngram_orders: n-gram length of each table of hashed n-grams. Tables add
            parameters, and knowledge, at little compute.
        ngram_rows: rows of each table.
    """

    vocabulary: int
    context: int = 32
    width: int = 64
    heads: int = 4
    layers: int = 2
    ngram_orders: tuple[int, ...] = ()
    ngram_rows: int = 4096


@final
class GPT(nn.Module):
    """A decoder-only transformer, optionally with tables of hashed n-grams.

    The tables are added after the blocks, not at the input: their gradients then appear
    throughout the backward pass, as in a deep network. Maps symbols (samples,
    positions), int64, to logits (samples, positions, vocabulary).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.symbols = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            _Block(config.width, config.heads) for _ in range(config.layers)
        )
        self.tables = nn.ModuleList(
            nn.Embedding(config.ngram_rows, config.width) for _ in config.ngram_orders
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of the symbol after each position."""
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        hidden = self.symbols(symbols) + self.positions(positions)
        buckets = hash_ngrams(symbols, self.config.ngram_orders, self.config.ngram_rows)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden)
            for index in range(layer, len(buckets), len(self.blocks)):
                hidden = hidden + self.tables[index](buckets[index])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def hash_ngrams(symbols: Tensor, orders: Sequence[int], rows: int) -> list[Tensor]:
    """Row in each order's hash table, in [0, rows), of the n-gram at each position.

    Positions before the first count as a separate symbol; tables of the same order use
    different hashes.
    """
    buckets = []
    for salt, order in enumerate(orders):
        key = torch.full_like(symbols, salt)
        for back in range(order):
            earlier = F.pad(symbols + 1, (back, 0))[:, : symbols.shape[1]]
            key = (key * 1_000_003 + earlier) % 2_147_483_647
        buckets.append(key * 40_503 // 8 % rows)
    return buckets


class _Block(nn.Module):
    """Attention and a perceptron, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        updated: Tensor = hidden + self.perceptron(hidden)
        return updated

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected
