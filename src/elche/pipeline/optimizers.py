"""Optimizers over a pipeline's parameters: their groups, and whether ranks agree.

Groups correspond between ranks by their ``name``, where all groups of an optimizer have
one, else by position. So all ranks must have the same groups with the same settings,
empty ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elche.errors import ConfigError, MismatchError

GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
NOT_SETTINGS = ("params", "param_names")


def only_optimizer(given: Any) -> torch.optim.Optimizer:
    """The one optimizer that a call is about.

    Raises:
        ConfigError: it is something else, or there are several.
    """
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            "expected one torch optimizer over this rank's parameters, got "
            f"{type(given).__name__}; of several, call this for each"
        )
    return as_optimizers(given)[0]


def as_optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer or several as a tuple.

    Raises:
        ConfigError: it is something else, or keeps state of all parameters together.
    """
    found = (given,) if isinstance(given, torch.optim.Optimizer) else given
    if not isinstance(found, (tuple, list)) or not all(
        isinstance(one, torch.optim.Optimizer) for one in found
    ):
        raise ConfigError(
            "expected a torch optimizer over this rank's parameters, or a list of "
            f"them, got {type(given).__name__}; () stands for none"
        )
    for one in found:
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS keeps one state for all parameters of a rank, which cannot be "
                "saved by parameter; use an optimizer with a state per parameter"
            )
    return tuple(found)


def describe(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Classes, groups and settings, which must agree between ranks, by their place."""
    found = {"the optimizers": str([type(one).__name__ for one in optimizers])}
    for number, one in enumerate(optimizers):
        where = f"optimizer {number} ({type(one).__name__})"
        groups = dict(keyed(one.param_groups))
        found[f"the groups of {where}"] = str(sorted(groups, key=str))
        for key, group in groups.items():
            for name, value in group.items():
                if name not in NOT_SETTINGS:
                    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
                    shown = value.item() if is_number else value
                    found[f"{name} of group {key} of {where}"] = repr(shown)
    return found


def check_alike(told: Sequence[Mapping[str, str]]) -> None:
    """Raises unless all ranks have the same optimizers with the same groups.

    Args:
        told: what each rank described.

    Raises:
        MismatchError: they differ; says where.
    """
    for rank, theirs in enumerate(told):
        for place in dict.fromkeys((*told[0], *theirs)):
            mine, other = told[0].get(place), theirs.get(place)
            if mine != other:
                raise MismatchError(
                    f"ranks disagree about {place}: rank 0 has {mine}, rank {rank} has "
                    f"{other}; give the same optimizers in the same order, with the "
                    "same groups and settings, on every rank; leave those groups empty "
                    "of which a rank has no parameters"
                )


def keyed(groups: Sequence[dict[str, Any]]) -> list[tuple[int | str, dict[str, Any]]]:
    """Groups of an optimizer, or of its state, by name if all have one, or by place."""
    names = [group.get("name") for group in groups]
    if len(set(names)) == len(groups) and all(isinstance(one, str) for one in names):
        return [(group["name"], group) for group in groups]
    return list(enumerate(groups))
