"""The demo's workload: model, data, loss, optimizer, and the order of samples.

The GPT is small enough for a CPU core, and large enough to communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler

from elche.demo.text import VOCABULARY_SIZE, CharDataset, load_corpus

Batch: TypeAlias = tuple[Tensor, Tensor]

BATCH_SIZE = 32
"""Default samples per batch of a workload."""
_EVAL_BATCH_SIZE = 128


@dataclass(frozen=True)
class Workload:
    """A model with its data, loss and optimizer.

    Attributes:
        seed: seed of the initial parameters and the order of samples.
        learning_rate: learning rate, tuned for one device and batch size 32.
        train_dataset: map-style data set with items (input, target).
        source: description of the data, for a report.
        network_fn: makes the network; `model_fn` seeds its parameters.
    """

    name: str
    seed: int
    learning_rate: float
    train_dataset: Dataset[tuple[Tensor, ...]]
    eval_batches: tuple[Batch, ...]
    source: str
    network_fn: Callable[[], nn.Module]

    def model_fn(self) -> nn.Module:
        """Makes the same new model at every call; global random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.network_fn()

    def optimizer_fn(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Makes a fused AdamW; an unfused one costs as much as the backward pass."""
        return AdamW(
            parameters,
            lr=self.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=True,
        )

    def loss_fn(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats, as a scalar."""
        logits: Tensor = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Mean loss over the held-out set; returns the model to training mode."""
        device = next(model.parameters()).device
        model.eval()
        total, samples = 0.0, 0
        with torch.no_grad():
            for inputs, targets in self.eval_batches:
                batch = (inputs.to(device), targets.to(device))
                total += float(self.loss_fn(model, batch)) * len(inputs)
                samples += len(inputs)
        model.train()
        return total / samples


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        context: maximum number of symbols in a sequence.
        width: features of a position; a multiple of `heads`.
        ngram_orders: n-gram length of each table of hashed n-grams. Tables add
            parameters and knowledge for little compute.
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


@dataclass(frozen=True)
class LanguageModel:
    """A network that predicts the next character from ``context`` characters."""

    network_fn: Callable[[], nn.Module]
    learning_rate: float
    context: int
    eval_samples: int = 1024


GPT_MODEL = LanguageModel(
    partial(GPT, GPTConfig(VOCABULARY_SIZE, ngram_orders=(2, 2, 3, 3, 4, 4, 5, 5))),
    learning_rate=3e-3,
    context=GPTConfig.context,
)
"""The demo's model, with 2.4 million parameters."""


def language_workload(
    name: str,
    model: LanguageModel,
    seed: int,
    num_samples: int,
    text: Path | None = None,
) -> Workload:
    """Workload that learns a text: a file, a directory, or the standard library.

    Raises:
        ConfigError: the text is missing or too short.
    """
    corpus = load_corpus(text)
    held_out = CharDataset(corpus.held_out, model.context, model.eval_samples)
    inputs, targets = zip(*(held_out[i] for i in range(len(held_out))), strict=True)
    return Workload(
        name=name,
        seed=seed,
        learning_rate=model.learning_rate,
        train_dataset=CharDataset(corpus.train, model.context, num_samples),
        eval_batches=split_batches(torch.stack(inputs), torch.stack(targets)),
        source=corpus.source,
        network_fn=model.network_fn,
    )


def split_batches(inputs: Tensor, targets: Tensor) -> tuple[Batch, ...]:
    """Splits a held-out set into batches."""
    size = _EVAL_BATCH_SIZE
    parts = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
    return tuple(parts)


def learning_rate_scale(progress: float) -> float:
    """Factor on the learning rate at a fraction of the run: warm-up, then decay."""
    warmup, floor = 0.05, 0.02
    return max(floor, min(progress / warmup, 1 - progress))


def split_edges(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Bounds of each rank's part of a batch: ``len(shares) + 1`` edges."""
    total = sum(shares)
    return [round(batch_size * sum(shares[:r]) / total) for r in range(len(shares) + 1)]


class SegmentSampler(Sampler[int]):
    """One shuffled order of the whole set, yielded in consecutive parts.

    Each iteration yields the next part, so all parts together yield every sample once,
    on any rank.
    """

    def __init__(self, num_samples: int, segments: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_samples, generator=generator)
        self._parts = order.tensor_split(segments)
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        part = self._parts[self._next % len(self._parts)]
        self._next += 1
        return iter(part.tolist())

    def __len__(self) -> int:
        return len(self._parts[self._next % len(self._parts)])


Order = RandomSampler | SegmentSampler


class SplitBatches(Sampler[list[int]]):
    """This rank's part of every global batch, by fixed shares."""

    def __init__(
        self, sampler: Order, batch_size: int, shares: Sequence[float], rank: int
    ) -> None:
        self._part = slice(*split_edges(batch_size, shares)[rank : rank + 2])
        self._batches = BatchSampler(sampler, batch_size, drop_last=True)

    @property
    def part_size(self) -> int:
        """Samples of this rank per batch."""
        return int(self._part.stop - self._part.start)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self._part] for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)
