"""Workloads of the benchmarks beside the demo's, and their optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Muon, Optimizer
from torch.utils.data import TensorDataset

from benchmarks.hetero.networks import ConvNet, ResidualMLP
from elche.demo.text import VOCABULARY_SIZE
from elche.demo.workload import (
    BATCH_SIZE,
    GPT,
    GPT_MODEL,
    Batch,
    GPTConfig,
    LanguageModel,
    Workload,
    language_workload,
    split_batches,
)
from elche.errors import ConfigError

WORKLOADS = ("mlp", "cnn", "gpt", "gpt-small", "gpt-10m")
"""Names that `build_workload` knows."""

OPTIMIZERS = ("adamw", "sgd", "muon")
"""Kinds of optimizers that `optimizers_of` knows."""

_BATCH_SIZES = {"gpt-10m": 8}
"""Ten million parameters compute so much for a token that batches are kept small."""


def _gpt(config: GPTConfig, rate: float, eval_samples: int) -> LanguageModel:
    return LanguageModel(partial(GPT, config), rate, config.context, eval_samples)


_EVAL_SAMPLES = 1024
_LARGE = GPTConfig(VOCABULARY_SIZE, context=8, width=320, layers=8)
_LANGUAGE = {
    "gpt": GPT_MODEL,
    "gpt-small": _gpt(GPTConfig(VOCABULARY_SIZE), 2e-3, _EVAL_SAMPLES),
    "gpt-10m": _gpt(_LARGE, 5e-4, 64),
}
_SGD_RATE = 50.0
"""SGD's learning rate over AdamW's, as tuned in docs/convergence.md."""

_CLASSES = 10
_SIDE = 16
_IN_FEATURES = 32
_TASK_SEED = 20_240_913
"""Seed of the tasks themselves: a run's seed changes its samples, not its task."""


def optimizers_of(
    workload: Workload, model: nn.Module, kind: str = "adamw"
) -> list[Optimizer]:
    """The model's optimizers, each stepped in every batch.

    Args:
        workload: of the model.
        model: of its `model_fn`.
        kind: ``"adamw"``; ``"sgd"`` with momentum; or ``"muon"`` for the matrices of
            all linear layers but the last, with AdamW beside it.

    Raises:
        ConfigError: a model without such matrices under Muon.
    """
    if kind == "sgd":
        rate = _SGD_RATE * workload.learning_rate
        return [SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)]
    if kind != "muon":
        return [workload.optimizer_fn(model.parameters())]
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    matrices = linear[:-1]
    if not matrices:
        raise ConfigError(
            f"model {workload.name} has no hidden linear layer for Muon; choose another"
            " --optimizer, or model gpt"
        )
    known = {id(parameter) for parameter in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = Muon(matrices, lr=workload.learning_rate, adjust_lr_fn="match_rms_adamw")
    return [muon, workload.optimizer_fn(others)]


def build_workload(
    name: str, seed: int = 0, num_samples: int = 8192, text: Path | None = None
) -> Workload:
    """Build a workload by name.

    Args:
        name: ``"mlp"`` and ``"cnn"`` classify synthetic samples, ``"gpt"``
            predicts characters; these have more than two million parameters.
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
    return language_workload(name, _LANGUAGE[name], seed, num_samples, text)


def batch_size_of(name: str) -> int:
    """Samples of a batch of the workload with this name."""
    return _BATCH_SIZES.get(name, BATCH_SIZE)


def _mlp(seed: int, num_samples: int) -> Workload:
    return Workload(
        name="mlp",
        seed=seed,
        learning_rate=3e-4,
        train_dataset=TensorDataset(*_teacher_samples(seed + 1, num_samples)),
        eval_batches=split_batches(*_teacher_samples(0, _EVAL_SAMPLES)),
        source="labels drawn from a fixed random network",
        network_fn=partial(ResidualMLP, _IN_FEATURES, _CLASSES),
    )


def _cnn(seed: int, num_samples: int) -> Workload:
    return Workload(
        name="cnn",
        seed=seed,
        learning_rate=1e-3,
        train_dataset=TensorDataset(*_texture_samples(seed + 1, num_samples)),
        eval_batches=split_batches(*_texture_samples(0, _EVAL_SAMPLES)),
        source="shifted random textures in noise",
        network_fn=partial(ConvNet, _SIDE, _CLASSES),
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
