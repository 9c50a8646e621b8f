"""A rank's report at the start: settings, model, data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from elche.comm.norm.sync_batch_norm import SyncBatchNorm, sync_batchnorm_layers
from elche.comm.tensors.unshareable import unshareable_module, why_unshareable
from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import Join
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.errors import ConfigError
from elche.runtime.data.leased_data import horizon_batches
from elche.runtime.data.prefetch import most_ahead
from elche.runtime.data.sample_order import sampler_with_state
from elche.runtime.data.stream_data import StreamView
from elche.runtime.process.environment import Placement
from elche.runtime.training import Training
from elche.torch_internals.held import BatchNormBase, held_buffers, unsaved_buffers

QUANTISED = frozenset({"bitsandbytes", "torchao"})
"""Packages of optimizers whose state is quantised."""


def describe(training: Training, epochs: int | None) -> Settings:
    """Settings, other than tensors, that must agree between ranks."""
    loader = training.loader
    synced_layers = sync_batchnorm_layers(training.model)
    return Settings(
        config=training.config,
        loader={
            "dataset_length": len(loader.dataset),  # type: ignore[arg-type]
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_batches": len(loader),
            "weight_of": training.weights is not None,
        },
        optimizer={
            name if place == 0 else f"{place + 1}.{name}": value
            for place, optimizer in enumerate(training.optimizers)
            for name, value in _described(optimizer).items()
        },
        min_share_samples=min_share_samples(training.model),
        epochs=epochs,
        micro_batches=training.micro_batches,
        is_default=training.is_default and not synced_layers,
        software=installed_versions(),
        is_stream=isinstance(loader.dataset, StreamView),
        syncs_batchnorm=bool(synced_layers),
        own_sampler=sampler_with_state(loader),
    )


def _described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's class, settings and state layout."""
    return {
        "class": type(optimizer).__name__,
        **{
            name if index == 0 else f"group {index}.{name}": value
            for index, group in enumerate(optimizer.param_groups)
            for name, value in plain_settings(group)
        },
        "state": [f"{key} {list(t.shape)}" for key, t in state_tensors(optimizer)],
    }


def join_event(
    placement: Placement, settings: Settings, model: nn.Module, loader: DataLoader[Any]
) -> Join:
    """Makes the `Join` message of this rank.

    It names only saved buffers: others are caches, which may differ after earlier
    training.
    """
    passing = {
        id(held_buffers(module)[name])
        for module in model.modules()
        for name in unsaved_buffers(module)
    }
    saved = [each for each in model.named_buffers() if id(each[1]) not in passing]
    named = [*model.named_parameters(), *saved]
    return Join(
        rank=placement.rank,
        version=PROTOCOL_VERSION,
        world_size=placement.world_size,
        settings=settings.as_pairs(),
        tensors=tuple(
            (name, str(list(tensor.shape)), _kind(tensor)) for name, tensor in named
        ),
        device=placement.device_name,
        horizon_batches=horizon_batches(loader) + most_ahead(placement.device),
        memory_bytes=placement.memory_bytes,
    )


def _kind(tensor: torch.Tensor) -> str:
    """A tensor's dtype, and whether it is a parameter that is not trained."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{dtype} (frozen)" if is_frozen else dtype


def optimizers_of(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """An optimizer, or those in a list or tuple.

    Raises:
        ConfigError: ``given`` is none of these, or an optimizer is listed twice.
    """
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    optimizers = tuple(o for o in found if isinstance(o, torch.optim.Optimizer))
    if not found or len(optimizers) < len(found):
        raise ConfigError(
            f"expected a torch.optim.Optimizer, or several in a list, got {given!r}"
        )
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError(f"an optimizer is listed twice: {given!r}")
    return optimizers


def check_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any],
) -> None:
    """Refuses arguments of the wrong type, foreign optimizers, and empty data sets.

    Raises:
        ConfigError: names the argument, and the expected one.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected model to be a torch.nn.Module, got {model!r}")
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"expected a torch.utils.data.DataLoader, got {type(loader).__qualname__}: "
            "give DataLoader(data_set, batch_size=...), a stream as an IterableDataset "
            "with samples_per_epoch=N, and wrap what elche.setup returns"
        )
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, model.parameters())):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} holds none of the model's "
                "parameters; build it from this model's parameters()"
            )
    if length_hint(loader.dataset, 1) == 0:
        raise ConfigError("the dataset is empty; expected at least one sample")


def check_shared(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any],
    config: RunConfig,
) -> None:
    """Refuses models, optimizers and loaders that ranks cannot share.

    Raises:
        ConfigError: names the problem, and what to do instead.
    """
    policy = config.policy
    try:
        len(loader.dataset), len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"expected a dataset and a sampler with a length: {error}; for a stream "
            "pass samples_per_epoch= to elche.setup (several ranks need it, and one "
            "rank with --events, --page or --report)"
        ) from error
    if loader.batch_sampler is None and policy == "sync":
        raise ConfigError(
            "a loader with batch_size=None has no batches that policy 'sync' could "
            "divide; give it a batch_size, or choose policy='cadence', whose local "
            "steps take a batch of the data set each"
        )
    if loader.batch_sampler is None and config.windows.local_batch_size is not None:
        raise ConfigError(
            "a loader with batch_size=None takes batches as the data set makes them, "
            "which local_batch_size cannot cut; leave it out, and let the data set "
            "make batches of as many samples"
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ConfigError(
            "the loader has a DistributedSampler, but elche divides the data itself; "
            "give the loader shuffle=True or a plain sampler"
        )
    if fault := unshareable_module(model):
        raise ConfigError(fault)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fault = why_unshareable(tensor)
        if fault:
            raise ConfigError(f"{name} {fault}")
    refuse_sync_norms(model, policy)
    for optimizer in optimizers:
        _check_optimizer(optimizer, config)
    own = {id(parameter) for parameter in model.parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    held = [p for group in groups for p in group["params"]]
    strange = [p for p in held if id(p) not in own]
    if strange:
        raise ConfigError(foreign_parameters("the optimizer", strange))


def foreign_parameters(optimizer: str, strange: Sequence[torch.Tensor]) -> str:
    """Error message for an optimizer of parameters that are not the model's."""
    return (
        f"{optimizer} holds {len(strange)} parameters that are not the model's (one "
        f"of shape {list(strange[0].shape)}); they would not be shared: put all "
        "trained modules into the model (one torch.nn.ModuleList or ModuleDict for "
        "elche.setup)"
    )


def refuse_sync_norms(model: nn.Module, policy: str) -> None:
    """Refuses SyncBatchNorm layers where ranks do not step together.

    Raises:
        ConfigError: names one.
    """
    norms = sync_batchnorm_layers(model)
    if norms and policy != "sync":
        raise ConfigError(
            f"{next(iter(norms)) or 'the model'} is a SyncBatchNorm layer, which "
            f"needs all ranks at every batch; under policy {policy!r} they run "
            "different batches: choose policy='sync', or keep the BatchNorm layers"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, config: RunConfig) -> None:
    """Refuses optimizers that ranks cannot step together.

    Raises:
        ConfigError: the state is quantised; a Lookahead runs under averaged parameters;
            or LBFGS, which evaluates the loss, runs without local steps.
    """
    defined_in = [kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__]
    if quantised := QUANTISED.intersection(defined_in):
        raise ConfigError(
            f"{type(optimizer).__name__} of {min(quantised)} quantises its state, "
            "which ranks cannot share; use an optimizer of torch.optim"
        )
    averages = config.policy != "sync" and not config.sums_gradients
    if averages and "Lookahead" in (kind.__name__ for kind in type(optimizer).__mro__):
        raise ConfigError(
            "Lookahead resets parameters to its own slow weights, which differ "
            f"between ranks under policy {config.policy!r}; choose policy 'sync', or "
            "pass the optimizer inside it"
        )
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    # Both options compare losses, each rank's own; all else uses common sums.
    by_loss = any(
        g["line_search_fn"] or g["tolerance_change"] for g in optimizer.param_groups
    )
    if config.sums_gradients or (by_loss and config.policy in ("sync", "auto")):
        raise ConfigError(
            "LBFGS evaluates its closure as often as this rank's own loss asks for, so "
            "ranks would take different steps; choose policy 'cadence' or 'async' "
            "(averaged parameters), or policy 'sync' or 'auto' with "
            "line_search_fn=None and tolerance_change=0"
        )


def installed_versions() -> dict[str, str]:
    """Versions of elche, and of torch as far as numbers and formats depend on it."""
    package = sys.modules["elche"]  # an import would be circular
    torchs = ".".join(version("torch").split(".")[:2])
    return {"elche": str(package.__version__), "torch": torchs}


def min_share_samples(model: nn.Module) -> int:
    """Least samples that the model can train on: BatchNorm of one rank needs two."""
    return 2 if _plain_norms(model) else 1


def batch_norm_hint(model: nn.Module, policy: str) -> str:
    """Line about BatchNorm layers where ranks share each batch, or ""."""
    trained = [name for name, layer in _plain_norms(model).items() if layer.training]
    if not trained or policy not in ("sync", "auto"):
        return ""
    more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
    on = " with policy='sync'" if policy == "auto" else ""
    return (
        f"elche: BatchNorm ({trained[0]!r}{more}) takes its statistics from each "
        "rank's share of a batch; elche.convert_sync_batchnorm(model) before "
        f"elche.setup{on} makes it the whole batch, as on one device"
    )


def _plain_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Unsynchronised BatchNorm layers, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and not isinstance(module, SyncBatchNorm)
    }


def plain_settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Comparable settings of a parameter group, and its size."""
    plain = [
        (name, float(value) if isinstance(value, torch.Tensor) else value)
        for name, value in group.items()
        if name != "params"
        and (_is_plain(value) or getattr(value, "numel", lambda: 0)() == 1)
    ]
    return [*plain, ("parameters", len(group["params"]))]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """State tensors of an optimizer, in the order of parameters and names."""
    return [
        (name, value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
