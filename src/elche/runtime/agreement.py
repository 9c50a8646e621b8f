"""What a rank presents at the start: settings, model, data."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.messages import PROTOCOL_VERSION, Join
from elche.errors import ConfigError
from elche.runtime.environment import Placement
from elche.runtime.leased_data import horizon_batches


def describe(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    epochs: int | None,
) -> Settings:
    """Everything but tensors that must agree between ranks."""
    return Settings(
        config=config.as_dict(),
        loader={
            "dataset_length": len(loader.dataset),  # type: ignore[arg-type]
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_batches": len(loader),
        },
        optimizer={
            "class": type(optimizer).__name__,
            "groups": [len(group["params"]) for group in optimizer.param_groups],
            **{k: v for k, v in optimizer.defaults.items() if _is_plain(v)},
        },
        min_share_samples=min_share_samples(model),
        epochs=epochs,
    )


def join_event(
    placement: Placement, settings: Settings, model: nn.Module, loader: DataLoader[Any]
) -> Join:
    """The message with which this rank presents itself."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return Join(
        rank=placement.rank,
        version=PROTOCOL_VERSION,
        world_size=placement.world_size,
        settings=settings.as_pairs(),
        tensors=tuple(
            (name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in named
        ),
        device=placement.device_name,
        horizon_batches=horizon_batches(loader),
    )


def check_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
) -> None:
    """Refuses what cannot be trained on several ranks, by name.

    Raises:
        ConfigError: an argument has the wrong type, or cannot be divided.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected model to be a torch.nn.Module, got {model!r}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"expected a torch.utils.data.DataLoader, got {loader!r}")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "an IterableDataset cannot be divided exactly yet; expected a map-style "
            "dataset (with __getitem__ and __len__)"
        )
    if len(loader.dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError("the dataset is empty; expected at least one sample")
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigError(
            "the loader has a DistributedSampler, but elche divides the data itself; "
            "give the loader shuffle=True or a plain sampler"
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and hasattr(module, "embedding_dim"):
            raise ConfigError(
                f"{name}: sparse gradients cannot be reduced; use sparse=False"
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ConfigError(
            "the optimizer holds none of the model's parameters; build it from this "
            "model's parameters()"
        )


def min_share_samples(model: nn.Module) -> int:
    """Least samples that the model can train on: BatchNorm needs two."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
    return 2 if any(isinstance(module, norms) for module in model.modules()) else 1


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
