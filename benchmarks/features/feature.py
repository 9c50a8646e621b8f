"""What a feature is: a training loop in its users' plain style, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH_SIZE = 16
SAMPLES = 245
"""The last of 16 batches has five samples."""
INPUTS, CLASSES = 12, 4


class PlainTorch:
    """Stands where a script says `elche` and nothing is to happen."""

    device = staticmethod(lambda: torch.device("cpu"))

    @staticmethod
    def setup(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Model, optimizer and loader as they are."""
        return arguments

    @staticmethod
    def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
        """The model as it is: one process has whole batches."""
        return model


@dataclass
class Seen:
    """Losses of a loop, each with the samples that it is of."""

    losses: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, loss: Tensor, samples: int) -> None:
        """Notes a batch that was trained on."""
        self.losses.append((loss.item(), samples))


@dataclass
class Trained:
    """What a feature's loop leaves.

    Attributes:
        model: all modules that the loop has changed.
        optimizer: the one whose learning rate is compared.
        seen: the losses.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seen: Seen

    def result(self) -> dict[str, Any]:
        """Plain data to save and compare."""
        state = self.model.state_dict()
        return {
            "state": {name: each.to("cpu", copy=True) for name, each in state.items()},
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "losses": self.seen.losses,
        }


Train = Callable[[Any], Trained]
"""A feature's loop; its argument is the module `elche`, or `PlainTorch`."""


@dataclass(frozen=True)
class Feature:
    """A feature, and what is to come out beside plain PyTorch.

    Attributes:
        what: the feature in a few words.
        train: the loop.
        sync: E exact, R rounding, S drawn at random, D differs, or N and the error.
        windows: A all as plain, D or L and what differs or may, N and the error.
        why: what explains it.
    """

    what: str
    train: Train
    sync: str
    windows: str
    why: str


FEATURES: dict[str, Feature] = {}
"""All features, in the order of the table."""


def feature(
    sync: str = "E", windows: str = "A", why: str = ""
) -> Callable[[Train], Train]:
    """Adds a loop to `FEATURES`; its docstring says what it is."""

    def add(train: Train) -> Train:
        what = (train.__doc__ or "").rstrip(".")
        FEATURES[train.__name__] = Feature(what, train, sync, windows, why)
        return train

    return add


def labelled(samples: int = SAMPLES) -> TensorDataset:
    """Points, and the class that a fixed linear map gives each."""
    draw = torch.Generator().manual_seed(1)
    teacher = torch.randn(INPUTS, CLASSES, generator=draw)
    x = torch.randn(samples, INPUTS, generator=draw)
    return TensorDataset(x, (x @ teacher).argmax(1))


def loss_over(model: nn.Module, batches: Any) -> Tensor:
    """Mean of the losses of batches that no loader of elche's has moved."""
    device = next(model.parameters()).device
    moved = ((x.to(device), y.to(device)) for x, y in batches)
    with torch.no_grad():
        return torch.stack([F.cross_entropy(model(x), y) for x, y in moved]).mean()


def network() -> nn.Sequential:
    """A classifier of one hidden layer."""
    return nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, CLASSES))


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """The optimizer where a feature is not about one."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def batches_of(data: Any = None, **options: Any) -> DataLoader[Any]:
    """The loader where a feature is not about one."""
    options = {"batch_size": BATCH_SIZE, "shuffle": True, **options}
    return DataLoader(labelled() if data is None else data, **options)


def usual(elche: Any, lr: float = 1e-2) -> tuple[Any, Any, Any, Seen]:
    """Model, optimizer and loader after set-up, and losses, where all are usual."""
    model, loader = network(), batches_of()
    return *elche.setup(model, adamw(model, lr), loader), Seen()


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, seen: Seen) -> None:
    """The step where a feature is not about it."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen(loss, len(x))


def epochs_of(model: Any, optimizer: Any, loader: Any, seen: Seen) -> None:
    """The loop where a feature is not about it."""
    for _epoch in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)


def trained(
    elche: Any, model: Any, optimizer: Any, loader: Any, **options: Any
) -> Trained:
    """Set-up and loop where a feature is not about them."""
    seen = Seen()
    model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
    epochs_of(model, optimizer, loader, seen)
    return Trained(model, optimizer, seen)
