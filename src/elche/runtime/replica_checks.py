"""What is asked of models, losses and optimizers before replicas in one process run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elche.errors import ConfigError

Located = tuple[str, torch.Tensor]


def check_model(model: object) -> None:
    """Refuses what cannot be copied to other devices.

    Raises:
        ConfigError: this is no model, or one without values yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected model to be a torch.nn.Module, got {model!r}")
    for name, tensor in _tensors(model):
        if is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(
                f"{name} has no values yet (it is lazy, or on the meta device); run a "
                "batch through the model, or load its weights, before LocalReplicas"
            )


def copied(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A copy of the model on each device.

    Raises:
        ConfigError: the model cannot be copied.
    """
    try:
        return [copy.deepcopy(model).to(device) for device in devices]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"the model cannot be copied to {', '.join(map(str, devices))}: {error}; "
            "modules may hold parameters, buffers and plain values, no results of "
            "other computations"
        ) from error


def check_places(
    replicas: Sequence[nn.Module], devices: Sequence[torch.device]
) -> None:
    """Refuses replicas that somebody has moved.

    Raises:
        ConfigError: one is not on its device.
    """
    for index, (replica, device) in enumerate(zip(replicas, devices, strict=True)):
        for name, tensor in _tensors(replica):
            place = tensor.device
            if place.type != device.type or device.index not in (None, place.index):
                raise ConfigError(
                    f"replica {index} is expected on {device}, and its {name} is on "
                    f"{place}; move the model back with .to({str(device)!r}), or make "
                    "another LocalReplicas with the devices that are meant"
                )


def check_loss_fn(loss_fn: object) -> None:
    """Refuses what cannot be called with a replica and its part of the batch.

    Raises:
        ConfigError: it is no function of these two.
    """
    kinds = [kind.__module__ for kind in type(loss_fn).__mro__]
    if nn.MSELoss.__module__ in kinds or not callable(loss_fn):
        raise ConfigError(
            "expected loss_fn to be a function of a replica and its part of the batch "
            f"that returns the mean loss, got {loss_fn!r}"
        )
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            "expected loss_fn to take two arguments, a replica and its part of the "
            f"batch (inputs and targets together): {error}"
        ) from error
    except ValueError:
        return  # written in C: nobody can tell


def check_loss(loss: object) -> torch.Tensor:
    """What a replica's loss function has returned, if it can be trained on.

    Raises:
        ConfigError: it is no real scalar, or nothing leads back to a parameter.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        got = (
            f"{list(loss.shape)} of {loss.dtype}"
            if isinstance(loss, torch.Tensor)
            else repr(loss)
        )
        raise ConfigError(
            f"expected loss_fn to return a scalar tensor of real numbers, got {got}"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss has no graph: nothing that it was computed from requires a "
            "gradient; compute it with the replica that loss_fn is given, without "
            "torch.no_grad(), .item() or .detach(), and leave parameters unfrozen"
        )
    return loss.reshape(())


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuses what cannot take one step on the model's gradients.

    Raises:
        ConfigError: it is no optimizer, not of this model, or wants a closure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(parameter) in own for parameter in held):
        raise ConfigError(
            "the optimizer holds none of the model's parameters; build it from the "
            "model that was given to LocalReplicas"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss again inside its step, by a "
            "closure, which train_step() has none for; call optimizer.step(closure) "
            "with a closure that calls optimizer.zero_grad() and returns "
            "replicas.backward(batch, loss_fn)"
        )


def _tensors(model: nn.Module) -> list[Located]:
    return [*model.named_parameters(), *model.named_buffers()]
