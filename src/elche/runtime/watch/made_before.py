"""Objects that a script made before its loop, found among all that Python holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elche.torch_internals.held import version


def parameters_in_optimizers() -> Iterator[torch.Tensor]:
    """Parameters of every optimizer of this process."""
    for optimizer in _instances(torch.optim.Optimizer):
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]


@final
class CopiesMade:
    """Copies of a model's parameters in a module, dict or list of the script.

    Views are left out: elche keeps averages in views of one tensor.

    Args:
        model: what is trained; copies are equal to it now.
        known: modules that were handed over; an AveragedModel is known anyway.
    """

    def __init__(self, model: nn.Module, known: Sequence[nn.Module]) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        parameters = [*model.parameters()]
        modules = (model, *known, *_instances(AveragedModel))
        owned = [parameter for each in modules for parameter in each.parameters()]
        ids = {id(each) for each in owned}
        self._versions = [
            (weakref.ref(tensor), version(tensor))
            for holder in _instances((type(model), dict, list))
            for tensor in self._copied(holder, parameters, ids)
        ]

    def take_written(self) -> bool:
        """True once, when one of them has been written in place since."""
        held = ((ref(), before) for ref, before in self._versions)
        is_written = any(t is not None and version(t) != before for t, before in held)
        if is_written:
            self._versions.clear()
        return is_written

    def _copied(
        self, holder: Any, parameters: list[nn.Parameter], owned: set[int]
    ) -> list[torch.Tensor]:
        if isinstance(holder, nn.Module):
            is_made = "_parameters" in vars(holder)
            values: list[Any] = [*holder.parameters()] if is_made else []
        elif isinstance(holder, dict):  # a subclass may mean something else by get()
            is_like = len(holder) >= len(self._names) and dict.__contains__(
                holder, self._names[0]
            )
            values = [dict.get(holder, n) for n in self._names] if is_like else []
        else:
            values = list.copy(holder)  # other threads may append
        is_copy = len(values) == len(parameters) > 0 and all(
            _is_copy(value, parameter) and id(value) not in owned
            for value, parameter in zip(values, parameters, strict=True)
        )
        return [*values] if is_copy else []


def _is_copy(value: Any, parameter: torch.Tensor) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)  # not fake, not wrapped
        and value.layout is torch.strided
        and not (value.is_meta or value.is_inference())
        and value.shape == parameter.shape
        and value.untyped_storage().nbytes() == value.nbytes
        and torch.equal(value.detach(), parameter.detach().to(value))
    )


def _instances(kind: type | tuple[type, ...]) -> Iterator[Any]:
    """By their types: asking a lazy module for its class would import it."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))
