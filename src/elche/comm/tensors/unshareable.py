"""Checks for models and tensors that several ranks cannot train together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elche.errors import ConfigError
from elche.torch_internals.groups import STEPPED_IN_BACKWARD

SHOWN_DIFFERENCES = 5

WRAPPERS = {
    "torch.distributed.fsdp": "is sharded by FSDP",
    "torch.nn.parallel.distributed": "is reduced by torch's DistributedDataParallel",
}
"""Torch modules whose classes mark a wrapped model, with the words for errors."""


def unshareable_module(model: nn.Module) -> str:
    """Describes the first module that ranks cannot train together; "" if none."""
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) and hasattr(module, "embedding_dim"):
            name = path or "the model"
            return f"{name}: sparse gradients cannot be reduced; use sparse=False"
    return wrapped_module(model)


def wrapped_module(model: nn.Module) -> str:
    """Describes the first module that torch reduces or shards; "" if none.

    Classes are recognized by their module's name, without importing it.
    """
    for path, module in model.named_modules():
        name = path or "the model"
        for kind in type(module).__mro__:
            for prefix, is_what in WRAPPERS.items():
                if kind.__module__.startswith(prefix):
                    return f"{name} {is_what}; give elche the plain model"
    return ""


def why_unshareable(tensor: torch.Tensor) -> str:
    """Fault of a parameter or buffer as a predicate for errors; "" if there is none.

    Covers faults that would fail on receiving ranks while the others wait.
    """
    if is_lazy(tensor):
        return "is lazy and has no shape yet; run one batch through the model first"
    if why := why_not_plain(tensor):
        return why
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}; expected a dense tensor"
    if tensor.is_meta:
        return "is on the meta device and has no values; use to_empty() and fill it"
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and not step for size, step in strides):
        return "has elements that share memory, as expand() makes them; clone() it"
    return ""


def why_not_plain(tensor: torch.Tensor) -> str:
    """Unsupported behavior that torch adds to a parameter, as a predicate; or ""."""
    if type(tensor.data).__name__ == "DTensor":
        return "is a DTensor, which is already distributed"
    if hasattr(tensor, STEPPED_IN_BACKWARD):
        return (
            "is stepped inside the backward pass (_apply_optimizer_in_backward), where "
            "its gradient is not complete yet; step an optimizer after it"
        )
    return ""


def model_layout(
    model: nn.Module, ignored: Collection[str] = (), *, has_strides: bool = True
) -> dict[str, str]:
    """Returns shape, dtype and role of a model's tensors by name, and their order.

    Args:
        model: model to describe.
        ignored: names of tensors to skip.
        has_strides: True to include strides, so that memory formats are compared.

    Raises:
        ConfigError: a tensor cannot be shared between ranks.
    """
    layout: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        if name in ignored:
            continue
        if why := why_unshareable(tensor):
            raise ConfigError(f"{name} {why}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        text = f"{list(tensor.shape)} {dtype}"
        if has_strides and not tensor.is_contiguous():
            text += f" strides {list(tensor.stride())}"
        layout[f"place {len(layout)}"] = name
        if name in parameters:
            role = "trained" if tensor.requires_grad else "frozen"
            layout[f"parameter {name}"] = f"{text} {role}"
        else:
            layout[f"buffer {name}"] = text
    return layout


def difference(layouts: Sequence[Mapping[str, str]]) -> str:
    """Describes the differences between rank 0 and another rank; "" if none."""
    first = layouts[0]
    for rank, found in enumerate(layouts):
        names = sorted(n for n in {*first, *found} if first.get(n) != found.get(n))
        names = [name for name in names if not name.startswith("place ")] or names
        if names:
            more = len(names) - SHOWN_DIFFERENCES
            lines = [
                f"{name}: rank 0 has {first.get(name, 'none')}, rank {rank} has "
                f"{found.get(name, 'none')}"
                for name in names[:SHOWN_DIFFERENCES]
            ]
            return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
    return ""
