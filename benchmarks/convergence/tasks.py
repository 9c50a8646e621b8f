"""What is learnt: small models whose replicas are trained side by side.

A replica is a row: parameters of all replicas are one tensor (replicas, parameters),
and a forward and backward pass of all of them is one sequence of batched products. That
is what makes eight ranks and some seeds fit on one core.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from elche.demo.text import VOCABULARY_SIZE, load_corpus

CONTEXT = 10
EMBEDDING = 16
WIDTH = 96
BLOCKS = 2
EVAL_CHARACTERS = 16_384


class Task(ABC):
    """A model, its data and its loss.

    Attributes:
        name: what the results call it.
        batch_size: samples of a local step.
        shapes: of the parameters of one replica.
        matrices: indices of the hidden layers' matrices among the shapes: Muon's.
    """

    name: str
    batch_size: int
    shapes: Sequence[tuple[int, ...]]
    matrices: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Parameters of one replica."""
        return sum(math.prod(shape) for shape in self.shapes)

    @abstractmethod
    def initial(self, seed: int) -> Tensor:
        """Parameters of one replica, flat."""

    @abstractmethod
    def stream(self, seed: int, batches: int) -> Tensor:
        """Samples of a run in their order, int64 of shape (batches, batch_size)."""

    @abstractmethod
    def losses(self, parameters: Sequence[Tensor], samples: Tensor) -> Tensor:
        """Sum over the replicas of their mean training loss.

        Args:
            parameters: of shape (replicas, *shape) each.
            samples: of shape (replicas, samples).
        """

    @abstractmethod
    def evaluate(self, parameters: Sequence[Tensor]) -> list[float]:
        """What is reported of each replica, on held-out data."""

    def views(self, rows: Tensor) -> list[Tensor]:
        """The parameters in flat rows; of shape (replicas, *shape) each."""
        parts, start = [], 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            parts.append(rows[:, start:stop].view(len(rows), *shape))
            start = stop
        return parts


@final
class Text(Task):
    """The next character after ten, of the standard library's sources.

    A residual network of two blocks with layer norms, 64 k parameters. Evaluated by
    the mean loss, in nats, over characters of
    held-out files.

    Args:
        batch_size: samples of a local step.
    """

    name = "text"

    def __init__(self, batch_size: int = 32) -> None:
        corpus = load_corpus()
        self.batch_size = batch_size
        self._train = corpus.train
        spaced = torch.linspace(
            0, corpus.held_out.numel() - CONTEXT - 1, EVAL_CHARACTERS
        ).long()
        self._eval = self._windows(corpus.held_out, spaced[None])
        inner: list[tuple[int, ...]] = [(WIDTH, WIDTH), (WIDTH,)] * 2
        self.shapes = [
            (VOCABULARY_SIZE, EMBEDDING),
            (CONTEXT * EMBEDDING, WIDTH),
            (WIDTH,),
            *inner * BLOCKS,
            (WIDTH, VOCABULARY_SIZE),
            (VOCABULARY_SIZE,),
        ]
        self.matrices = range(1, 2 + 4 * BLOCKS, 2)

    @override
    def initial(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for index, shape in enumerate(self.shapes):
            values = torch.randn(shape, generator=generator)
            scale = 0.0 if len(shape) == 1 else shape[0] ** -0.5
            parts.append(values.flatten() * (0.5 if index == 0 else scale))
        return torch.cat(parts)

    def stream(self, seed: int, batches: int) -> Tensor:
        """Places in the text, drawn with replacement."""
        generator = torch.Generator().manual_seed(1_000_003 + seed)
        most = self._train.numel() - CONTEXT
        return torch.randint(most, (batches, self.batch_size), generator=generator)

    @override
    def losses(self, parameters: Sequence[Tensor], samples: Tensor) -> Tensor:
        inputs, targets = self._windows(self._train, samples)
        logits = self._logits(parameters, inputs)
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return total / samples.shape[1]

    @torch.no_grad()
    @override
    def evaluate(self, parameters: Sequence[Tensor]) -> list[float]:
        inputs, targets = self._eval
        found = []
        for replica in range(len(parameters[0])):
            one = [part[replica : replica + 1] for part in parameters]
            logits = self._logits(one, inputs)
            found.append(float(F.cross_entropy(logits[0], targets[0])))
        return found

    @staticmethod
    def _windows(text: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        inputs = text[places[..., None] + torch.arange(CONTEXT)]
        return inputs, text[places + CONTEXT]

    def _logits(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        replicas, samples, _ = inputs.shape
        table, *layers = parameters
        rows = torch.arange(replicas)[:, None]
        embedded = table[rows, inputs.view(replicas, -1)].view(replicas, samples, -1)
        pairs = list(zip(layers[::2], layers[1::2], strict=True))
        hidden = _linear(embedded, *pairs[0])
        for first, second in zip(pairs[1:-1:2], pairs[2:-1:2], strict=True):
            inside = _linear(F.layer_norm(hidden, (WIDTH,)), *first)
            hidden = hidden + _linear(torch.relu(inside), *second)
        return _linear(F.layer_norm(hidden, (WIDTH,)), *pairs[-1])


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], inputs, weight)
