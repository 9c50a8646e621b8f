"""The user's objects to train: model, optimizer, loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elche.comm.transport.process_group import Group
from elche.config import RunConfig
from elche.config_checks import check_whole
from elche.errors import ProtocolError
from elche.runtime.data.batch_weights import BatchWeights, WeightOf
from elche.runtime.process.stop_signals import StopRequest
from elche.runtime.watch.followed_schedulers import check_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Parts of a checkpoint on one rank.

    Attributes:
        model: trained model.
        optimizers: its optimizers; the first is that of `elche.setup`.
        copies: copies of the model that the user has given.
        generators: generators that the run draws from, by name.
        is_common: all ranks take the same steps, so optimizers are equal on all.
        state: state of the run, see `elche.state_dict`.
        epochs: number of the next epoch, and the rest of a cut one.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    copies: Sequence[nn.Module]
    generators: dict[str, torch.Generator]
    is_common: bool
    state: dict[str, Any]
    epochs: dict[str, Any]


def generators_of(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    """Generators that the order of a loader is drawn from, by name."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = {
        "loader": loader,
        "sampler": loader.sampler,
        "batch sampler": loader.batch_sampler,
        "inner sampler": inner,
    }
    found = {name: getattr(each, "generator", None) for name, each in holders.items()}
    return {n: each for n, each in found.items() if isinstance(each, torch.Generator)}


class Pauses:
    """Pauses of an epoch; none, unless a subclass adds them.

    Attributes:
        is_active: checkpoints may be made inside epochs.
        counts_epochs: the loop is over `elche.epochs`.
    """

    is_active = False
    counts_epochs = False

    def begin_pass(self) -> bool:
        """Begins a pass over the loader; returns False if it was done already."""
        return True

    def wants_cut(self, *, is_first: bool = True) -> bool:
        """True if this rank is to request a cut; called at every batch.

        The first rank cuts for a requested or due checkpoint, any rank for an end.
        """
        return False

    def wants_end(self) -> bool:
        """True if the run is to end with a last checkpoint."""
        return False

    def cut(self, *, is_end: bool) -> None:
        """Handles a cut of the epoch, on every rank; ``is_end``: without a rest."""

    def send_state(self, group: Group, source: int, is_new: bool) -> None:
        """Sends the state of ``source`` to ranks that join; with all ranks."""
        raise ProtocolError("no state for a joining rank is kept here")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a rank's training, whatever is trained.

    Attributes:
        config: the run's settings.
        epochs: number of epochs of the run, if known.
        micro_batches: the loop runs a batch above the rank's ``max_samples`` in several
            parts, as the `Trainer` does; a user's own loop must not.
        copies: copies of the model that the loop updates (EMA).
        is_default: the policy was not named.
    """

    config: RunConfig
    epochs: int | None = None
    micro_batches: bool = False
    copies: Sequence[nn.Module] = ()
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupConfig(TrainingOptions):
    """Options of `elche.setup` and the `Trainer`, beside the objects to train.

    Attributes:
        samples_per_epoch: epoch length of an IterableDataset; None for its ``len()``.
        weight_of: returns the weight of a batch; None: its samples.
        schedulers: schedulers that follow the run's progress in windows.
        stops: request to end the loop, if there may be one.

    Raises:
        ConfigError: ``epochs`` is below 1, or a scheduler is not one of torch's.
    """

    samples_per_epoch: int | None = None
    weight_of: WeightOf | None = None
    schedulers: Sequence[LRScheduler] = ()
    stops: StopRequest | None = None

    def __post_init__(self) -> None:
        for scheduler in self.schedulers:
            check_scheduler(scheduler)
        if self.epochs is not None:
            check_whole("epochs", self.epochs, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(TrainingOptions):
    """Model, optimizer, data and options of this rank.

    Attributes:
        model: the model, equal on all ranks.
        optimizers: its optimizers passed to `elche.setup`, the main one first.
        loader: the user's loader.
        weights: weights of batches in means; None: their samples.
        pauses: decides when an epoch is cut, and handles the cut.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loader: DataLoader[Any]
    weights: BatchWeights | None = None
    pauses: Pauses = field(default_factory=Pauses)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The main optimizer."""
        return self.optimizers[0]
