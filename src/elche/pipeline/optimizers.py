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


def describe(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Classes, groups and settings, which must agree between ranks."""
    return [
        [type(one).__name__, [[key, _settings(group)] for key, group in keyed(one)]]
        for one in optimizers
    ]


def check_alike(told: Mapping[int, Any]) -> None:
    """Raises unless all ranks have the same optimizers with the same groups.

    Args:
        told: what each rank described, by rank.

    Raises:
        MismatchError: they differ; says where.
    """
    root, first = next(iter(told.items()))
    for rank, other in told.items():
        kinds = [[one[0] for one in each] for each in (first, other)]
        if kinds[0] != kinds[1]:
            raise MismatchError(
                f"rank {root} gave the optimizers {kinds[0]}, rank {rank} {kinds[1]}; "
                "give the same ones in the same order everywhere"
            )
        for (kind, mine), (_, theirs) in zip(first, other, strict=True):
            keys = [sorted(key for key, _ in each) for each in (mine, theirs)]
            if keys[0] != keys[1]:
                raise MismatchError(
                    f"the groups of {kind} are {keys[0]} on rank {root} and {keys[1]} "
                    f"on rank {rank}; make the same groups on every rank, and leave "
                    "those empty of which it has no parameters"
                )
            there = dict(theirs)
            for key, here in mine:
                where = f"group {key} of {kind}"
                _compare_settings(where, (root, here), (rank, there[key]))


def keyed(optimizer: torch.optim.Optimizer) -> list[tuple[int | str, dict[str, Any]]]:
    """Groups by name if all have one of their own, else by position."""
    return keyed_groups(optimizer.param_groups)


def keyed_groups(
    groups: Sequence[dict[str, Any]],
) -> list[tuple[int | str, dict[str, Any]]]:
    """Groups of an optimizer, or of its state, with the keys of `keyed`."""
    names = [group.get("name") for group in groups]
    if len(set(names)) == len(groups) and all(isinstance(one, str) for one in names):
        return [(group["name"], group) for group in groups]
    return list(enumerate(groups))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as text: a learning rate may be a tensor."""
    return {
        key: repr(value.item() if _is_number(value) else value)
        for key, value in sorted(group.items())
        if key not in NOT_SETTINGS
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _compare_settings(
    where: str, first: tuple[int, dict[str, str]], other: tuple[int, dict[str, str]]
) -> None:
    (root, mine), (rank, theirs) = first, other
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            raise MismatchError(
                f"{where} has {key} {mine.get(key)} on rank {root} and "
                f"{theirs.get(key)} on rank {rank}; give the same settings on every "
                "rank"
            )
