"""Parameter names of the whole model for the layers that it was split into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError


@final
@dataclass(frozen=True)
class SplitNames:
    """Names of split layers; the fields are those of `LayerList`.

    Attributes:
        names: prefix of each layer; its number where it is no module of the model.
        aliases: by layer, the model's names of what it holds, or None for the prefix.
        of_state: every name of the model's state_dict, with all of the same tensor.
    """

    names: tuple[str, ...]
    aliases: tuple[dict[str, str] | None, ...]
    of_state: dict[str, tuple[str, ...]]


def names_of_split(model: nn.Module, modules: Sequence[Any]) -> SplitNames:
    """Reads the names, and checks that layers and model hold the same.

    Args:
        model: as the user gave it.
        modules: what `split` made of it.

    Raises:
        ConfigError: one is no module, or holds what the model has not, or none holds
            what the model has.
    """
    prefixes = {id(one): name for name, one in model.named_modules()}
    originals: dict[int, str] = {}
    for name, one in _held(model):
        originals.setdefault(id(one), name)
    covered: set[int] = set()
    names: list[str] = []
    aliases: list[dict[str, str] | None] = []
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"expected split to return modules, got {type(module).__name__} at "
                f"{index}; wrap a function in a module"
            )
        held = _held(module)
        covered |= {id(one) for _, one in held}
        prefix = prefixes.get(id(module))
        names.append(f"{index}" if prefix is None else prefix)
        if prefix is not None:
            aliases.append(None)
            continue
        foreign = [name for name, one in held if id(one) not in originals]
        if foreign:
            raise ConfigError(
                f"layer {index} of split has {', '.join(foreign[:3])}, which the model "
                "has not; layers must hold the model's own parameters"
            )
        aliases.append({name: originals[id(one)] for name, one in held})
    left = [name for key, name in originals.items() if key not in covered]
    if left:
        raise ConfigError(
            f"no layer of split holds {', '.join(left[:3])} of the model, which would "
            "never be trained; add the module that does"
        )
    return SplitNames(tuple(names), tuple(aliases), _names_of_state(model))


def _held(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _names_of_state(model: nn.Module) -> dict[str, tuple[str, ...]]:
    state = model.state_dict()
    owners = {name: id(one) for name, one in _held(model) if name in state}
    shared: dict[int, list[str]] = {}
    for name, key in owners.items():
        shared.setdefault(key, []).append(name)
    return {
        name: tuple(shared[owners[name]]) if name in owners else (name,)
        for name in state
    }
