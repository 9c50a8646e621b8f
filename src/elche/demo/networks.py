"""The demo's networks: small enough for a CPU core, large enough to communicate.

The variants for benchmarks hold more than two million parameters, so that a
reduction costs what it costs elsewhere, while their compute stays well below
the time that an emulated device declares for a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class ResidualMLP(nn.Module):
    """Pre-norm residual perceptron: (samples, in_features) to (samples, classes)."""

    def __init__(
        self, in_features: int, classes: int, width: int = 512, depth: int = 9
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(in_features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of samples."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@final
class ConvNet(nn.Module):
    """Two convolutions with batch normalisation and a wide head.

    (samples, 1, side, side) to (samples, classes); `side` is a multiple of 4.
    """

    def __init__(
        self, side: int, classes: int, channels: int = 16, width: int = 1024
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * channels * (side // 4) ** 2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        vocabulary: number of symbols.
        context: most symbols in a sequence.
        width: features of a position; a multiple of `heads`.
        heads: attention heads.
        layers: transformer blocks.
        ngram_orders: one table of hashed n-grams for each entry, the length of
            the n-gram. Tables add parameters, and knowledge, at little compute.
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

    Pre-norm blocks as in Radford et al., "Language Models are Unsupervised
    Multitask Learners" (2019). The tables hold hash embeddings (Svenstrup et
    al., 2017) of n-grams. They are added after the blocks, some after each, and
    not at the input: their gradients then appear throughout the backward pass,
    as a deep network's do, and not all at its end.

    Maps symbols (samples, positions), int64, to logits (samples, positions,
    vocabulary).
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
        """Logits of the symbol that follows each position."""
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        hidden = self.symbols(symbols) + self.positions(positions)
        buckets = hash_ngrams(symbols, self.config.ngram_orders, self.config.ngram_rows)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden)
            for index in range(layer, len(buckets), len(self.blocks)):
                hidden = hidden + self.tables[index](buckets[index])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@final
class CharLSTM(nn.Module):
    """An LSTM over characters with tables of hashed n-grams before and after it.

    Maps symbols (samples, positions), int64, to logits (samples, positions,
    vocabulary).
    """

    _ORDERS = (2, 3, 4, 5)
    _ROWS = 4096

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, width)
        self.tables = nn.ModuleList(
            nn.Embedding(self._ROWS, width) for _ in self._ORDERS
        )
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        for table in (self.symbols, *self.tables):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of the symbol that follows each position."""
        buckets = hash_ngrams(symbols, self._ORDERS, self._ROWS)
        known = [table(at) for table, at in zip(self.tables, buckets, strict=True)]
        hidden, _ = self.lstm(self.symbols(symbols) + known[0] + known[2])
        logits: Tensor = self.head(hidden + known[1] + known[3])
        return logits


def hash_ngrams(symbols: Tensor, orders: Sequence[int], rows: int) -> list[Tensor]:
    """Row of a hash table for the n-gram that ends at each position.

    Args:
        symbols: (samples, positions), int64, not negative.
        orders: n of each table's n-grams, at least 1; tables of the same n get
            different hashes.
        rows: rows of each table.

    Returns:
        For each order a tensor like `symbols` with values in [0, rows). Symbols
        before the first position count as a symbol of their own.
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
