"""State of the layers under the whole model's names: this rank's part, and all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elche.errors import ConfigError
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.stage import Layer

SHOWN = 3


def parameter_names(parts: Parts) -> dict[int, tuple[str, ...]]:
    """All names that the model has for each of a rank's parameters, by its id.

    In one order on all ranks, so that the first one names a shared parameter.
    """
    layers = parts.given.layers

    def name_of(index: int, own: str) -> str:
        aliases, prefix = layers.aliases[index], layers.names[index]
        if aliases is not None and own in aliases:
            return aliases[own]
        return f"{prefix}.{own}" if prefix else own

    tied = {use: uses for uses in parts.given.ties for use in uses}
    found: dict[int, tuple[str, ...]] = {}
    for index, layer in parts.built.items():
        for own, one in layer.module.named_parameters():
            names = [name_of(*use) for use in tied.get((index, own), [(index, own)])]
            known = [layers.state_names.get(name, (name,)) for name in names]
            found[id(one)] = tuple(dict.fromkeys(n for some in known for n in some))
    return found


def local_state(
    layers: Iterable[Layer], names: Mapping[str, tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of these layers under the model's names.

    Args:
        layers: of this rank.
        names: all names of a tensor that the model knows under several, by each.
    """
    return {
        known: value
        for layer in layers
        for name, value in layer.module.state_dict().items()
        if isinstance(value, torch.Tensor)
        for known in names.get(layer.prefixed(name), (layer.prefixed(name),))
    }


def load_state(
    mine: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    rank: int,
    is_known: Callable[[str], bool],
) -> None:
    """Copies this rank's part out of the whole model's state.

    Args:
        mine: this rank's part.
        state: of the whole model.
        rank: this rank.
        is_known: whether a name may be one of another rank's layers.

    Raises:
        ConfigError: something is missing, or has another shape, or belongs nowhere;
            nothing has changed.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"expected a state_dict, got {type(state).__name__}")
    missing = [name for name in mine if name not in state]
    other = [
        f"{name} {_form(state[name])} (not {_form(value)})"
        for name, value in mine.items()
        if name in state and _form(state[name]) != _form(value)
    ]
    extra = [str(n) for n in state if n not in mine and not is_known(str(n))]
    wrong = [
        *([f"has no {few(missing)}, which rank {rank} needs"] if missing else []),
        *([f"has another shape of {few(other)}"] if other else []),
        *([f"has {few(extra)}, which the model has not"] if extra else []),
    ]
    if wrong:
        raise ConfigError(
            f"the state {', and '.join(wrong)}; nothing was loaded on rank {rank}; "
            "give the state_dict of this model"
        )
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(state[name])


def _form(value: Any) -> str:
    """Form of a value that must be equal where it is copied into another."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{list(value.shape)}{' on meta' if value.is_meta else ''}"


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    left = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {left} more" if left > 0 else "")
