"""Workloads of the demo and the benchmarks: a model, its data, loss and optimizer.

Every workload is built from a seed without a download. Its task can be learnt,
has noise that no model predicts, and a held-out set that is the same for every
contender, so that evaluation losses can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils.data import Dataset, TensorDataset

from elche.demo.networks import GPT, CharLSTM, ConvNet, GPTConfig, ResidualMLP
from elche.demo.text import VOCABULARY_SIZE, CharDataset, load_corpus
from elche.errors import ConfigError

Batch: TypeAlias = tuple[Tensor, Tensor]

WORKLOADS = ("mlp", "cnn", "lstm", "gpt", "gpt-small", "gpt-10m")
"""Names that `build_workload` knows."""

OPTIMIZERS = ("adamw", "sgd", "muon")
"""Kinds of optimizers that `Workload.optimizers` knows."""

BATCH_SIZE = 32
"""Samples of a batch, where a workload has no size of its own."""

_BATCH_SIZES = {"gpt-10m": 8}
"""Ten million parameters compute so much for a token that batches are kept small."""

_GPTS = {
    "gpt": (GPTConfig(VOCABULARY_SIZE, ngram_orders=(2, 2, 3, 3, 4, 4, 5, 5)), 3e-3),
    "gpt-small": (GPTConfig(VOCABULARY_SIZE), 2e-3),
    "gpt-10m": (GPTConfig(VOCABULARY_SIZE, context=8, width=320, layers=8), 5e-4),
}
"""Sizes and learning rates of the language models."""

_LSTM_CONTEXT, _LSTM_LEARNING_RATE = 16, 3e-3
_SGD_RATE = 50.0
"""SGD's learning rate over AdamW's, as tuned in docs/convergence.md."""

_CLASSES = 10
_EVAL_SAMPLES = 1024
_FEW_EVAL_SAMPLES = 64
_EVAL_BATCH_SIZE = 128
_SIDE = 16
_IN_FEATURES = 32
_TASK_SEED = 20_240_913
"""Seed of the tasks themselves: a run's seed changes its samples, not its task."""


@dataclass(frozen=True)
class Workload:
    """A model with everything that is needed to train and to judge it.

    Attributes:
        name: one of `WORKLOADS`.
        seed: what the initial parameters and the samples are drawn from.
        learning_rate: of `optimizer_fn`; tuned for one device and batch size 32.
        train_dataset: map-style; items are (input, target).
        eval_batches: the held-out set.
        source: what the data are, for a report.
        network_fn: makes the network; its parameters are `model_fn`'s business.
    """

    name: str
    seed: int
    learning_rate: float
    train_dataset: Dataset[tuple[Tensor, ...]]
    eval_batches: tuple[Batch, ...]
    source: str
    network_fn: Callable[[], nn.Module]

    def model_fn(self) -> nn.Module:
        """A new model, the same at every call; global random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.network_fn()

    def optimizer_fn(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW; fused, because unfused it costs as much as the whole backward."""
        return AdamW(
            parameters,
            lr=self.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=True,
        )

    def optimizers(self, model: nn.Module, kind: str = "adamw") -> list[Optimizer]:
        """The model's optimizers, each stepped in every batch.

        Args:
            model: of `model_fn`.
            kind: ``"adamw"``; ``"sgd"`` with momentum; or ``"muon"`` for the matrices
                of all linear layers but the last, with AdamW beside it.

        Raises:
            ConfigError: unknown kind, or a model without such matrices under Muon.
        """
        if kind == "sgd":
            rate = _SGD_RATE * self.learning_rate
            return [SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)]
        if kind != "muon":
            return [self.optimizer_fn(model.parameters())]
        linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        matrices = linear[:-1]
        if not matrices:
            raise ConfigError(
                f"model {self.name} has no hidden linear layer for Muon; choose another"
                " --optimizer, or model gpt"
            )
        known = {id(parameter) for parameter in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        muon = Muon(matrices, lr=self.learning_rate, adjust_lr_fn="match_rms_adamw")
        return [muon, self.optimizer_fn(others)]

    def loss_fn(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch, in nats: a scalar."""
        inputs, targets = batch
        logits: Tensor = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Mean loss over the held-out set; the model's modes are left as found."""
        modes = {module: module.training for module in model.modules()}
        device = next(model.parameters()).device
        model.eval()
        try:
            with torch.no_grad():
                total = 0.0
                for inputs, targets in self.eval_batches:
                    batch = (inputs.to(device), targets.to(device))
                    total += float(self.loss_fn(model, batch)) * len(inputs)
        finally:
            for module, mode in modes.items():
                module.training = mode
        return total / sum(len(inputs) for inputs, _ in self.eval_batches)

    def with_learning_rate(self, learning_rate: float) -> Workload:
        """The same workload with another learning rate."""
        return replace(self, learning_rate=learning_rate)


def build_workload(
    name: str, seed: int = 0, num_samples: int = 8192, text: Path | None = None
) -> Workload:
    """Build a workload by name.

    Args:
        name: ``"mlp"`` and ``"cnn"`` classify synthetic samples, ``"gpt"`` and
            ``"lstm"`` predict characters; these have more than two million parameters.
            ``"gpt-small"`` is the demo's: a tenth of a million. ``"gpt-10m"`` is for
            slow links: ten million, sequences of 8 characters in batches of 8, so that
            its real compute (0.1 s a batch on one core) is small beside what emulated
            devices are made to take.
        seed: of the initial parameters and the synthetic samples. The task and the
            held-out set do not depend on it.
        num_samples: size of the training set.
        text: file or directory for the language models; None reads the
            standard library's sources.

    Raises:
        ConfigError: on an unknown name, fewer than one sample, or a text that is
            missing or too short.
    """
    if name not in WORKLOADS:
        raise ConfigError(
            f"unknown model {name!r}; choose one of {', '.join(WORKLOADS)}"
        )
    if num_samples < 1:
        raise ConfigError(f"num_samples must be at least 1, got {num_samples}")
    if name == "mlp":
        return _mlp(seed, num_samples)
    if name == "cnn":
        return _cnn(seed, num_samples)
    if name == "lstm":
        lstm = partial(CharLSTM, VOCABULARY_SIZE), _LSTM_LEARNING_RATE, _LSTM_CONTEXT
        return _language(name, seed, num_samples, text, lstm)
    config, rate = _GPTS[name]
    gpt = partial(GPT, config), rate, config.context
    return _language(name, seed, num_samples, text, gpt)


def batch_size_of(name: str) -> int:
    """Samples of a batch of the workload with this name."""
    return _BATCH_SIZES.get(name, BATCH_SIZE)


def learning_rate_scale(progress: float) -> float:
    """Factor on the learning rate: a short linear warm-up, then a linear decay.

    With a constant rate the synthetic tasks' evaluation loss wanders by a few per
    cent from step to step, more than the methods under comparison differ.

    Args:
        progress: samples trained on over samples of the whole run, 0 to 1.
    """
    warmup, floor = 0.05, 0.02
    return max(floor, min(progress / warmup, 1 - progress))


def _mlp(seed: int, num_samples: int) -> Workload:
    return Workload(
        name="mlp",
        seed=seed,
        learning_rate=3e-4,
        train_dataset=TensorDataset(*_teacher_samples(seed + 1, num_samples)),
        eval_batches=_batches(*_teacher_samples(0, _EVAL_SAMPLES)),
        source="labels drawn from a fixed random network",
        network_fn=partial(ResidualMLP, _IN_FEATURES, _CLASSES),
    )


def _cnn(seed: int, num_samples: int) -> Workload:
    return Workload(
        name="cnn",
        seed=seed,
        learning_rate=1e-3,
        train_dataset=TensorDataset(*_texture_samples(seed + 1, num_samples)),
        eval_batches=_batches(*_texture_samples(0, _EVAL_SAMPLES)),
        source="shifted random textures in noise",
        network_fn=partial(ConvNet, _SIDE, _CLASSES),
    )


def _language(
    name: str,
    seed: int,
    num_samples: int,
    text: Path | None,
    model: tuple[Callable[[], nn.Module], float, int],
) -> Workload:
    """A model of the next character; `model`: network, learning rate, context."""
    network_fn, learning_rate, context = model
    corpus = load_corpus(text)
    few = batch_size_of(name) < BATCH_SIZE
    evaluated = _FEW_EVAL_SAMPLES if few else _EVAL_SAMPLES
    held_out = CharDataset(corpus.held_out, context, evaluated)
    inputs, targets = zip(*(held_out[i] for i in range(len(held_out))), strict=True)
    return Workload(
        name=name,
        seed=seed,
        learning_rate=learning_rate,
        train_dataset=CharDataset(corpus.train, context, num_samples),
        eval_batches=_batches(torch.stack(inputs), torch.stack(targets)),
        source=corpus.source,
        network_fn=network_fn,
    )


def _teacher_samples(draw: int, num_samples: int) -> Batch:
    """Gaussian inputs, labels drawn from what a fixed random network predicts."""
    task = torch.Generator().manual_seed(_TASK_SEED)
    hidden = torch.randn(_IN_FEATURES, 16, generator=task) / _IN_FEATURES**0.5
    output = torch.randn(16, _CLASSES, generator=task)
    generator = torch.Generator().manual_seed(draw)
    inputs = torch.randn(num_samples, _IN_FEATURES, generator=generator)
    logits = torch.tanh(2.0 * inputs @ hidden) @ output
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return inputs, targets.squeeze(1)


def _texture_samples(draw: int, num_samples: int) -> Batch:
    """Images (samples, 1, side, side) of one texture per class, shifted, in noise.

    One label in five is drawn at random.
    """
    task = torch.Generator().manual_seed(_TASK_SEED)
    coarse = torch.randn(_CLASSES, 1, _SIDE // 4, _SIDE // 4, generator=task)
    padded = F.pad(coarse, (1, 1, 1, 1), mode="circular")
    textures = F.interpolate(padded, scale_factor=4, mode="bicubic")[:, 0, 4:-4, 4:-4]
    generator = torch.Generator().manual_seed(draw)
    targets = torch.randint(_CLASSES, (num_samples,), generator=generator)
    shift = torch.randint(_SIDE, (2, num_samples, 1, 1), generator=generator)
    pixels = torch.arange(_SIDE)
    rows = (pixels.view(1, -1, 1) + shift[0]) % _SIDE
    columns = (pixels.view(1, 1, -1) + shift[1]) % _SIDE
    images = textures[targets.view(-1, 1, 1), rows, columns].unsqueeze(1)
    images = images + torch.randn(images.shape, generator=generator)
    random = torch.randint(_CLASSES, (num_samples,), generator=generator)
    wrong = torch.rand(num_samples, generator=generator) < 0.2
    return images, torch.where(wrong, random, targets)


def _batches(inputs: Tensor, targets: Tensor) -> tuple[Batch, ...]:
    size = _EVAL_BATCH_SIZE
    parts = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
    return tuple(parts)
