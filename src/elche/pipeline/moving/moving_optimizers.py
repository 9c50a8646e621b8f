"""Optimizers whose parameters move between ranks: groups, state, and the exchange.

A parameter that moves takes the state that its optimizer keeps for it along, and goes
into the group there that its group is here: the one of the same ``name``, where all
groups of an optimizer have one, else the one at the same position. So all ranks must
have the same groups with the same settings, empty ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.trees import flatten, map_tensors, unflatten

GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
NOT_SETTINGS = ("params", "param_names")
_SHOWN = 3


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
                "LBFGS keeps one state for all parameters of a rank, which cannot move "
                "with some of them; use an optimizer with a state per parameter"
            )
    return tuple(found)


@dataclass(frozen=True)
class Moving:
    """A parameter that leaves a rank, or has come to it.

    Attributes:
        name: the model's.
        place: index of its optimizer and key of its group there; None if no optimizer
            holds it.
        state: what the optimizer keeps for it, nested, on the CPU or any device.
    """

    name: str
    place: tuple[int, int | str] | None
    state: dict[str, Any]


@final
class OptimizerGroups:
    """The optimizers of this rank.

    Args:
        optimizers: in the same order on every rank.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)

    def describe(self) -> list[Any]:
        """What must agree between ranks: classes, groups and their settings."""
        return [
            [
                type(one).__name__,
                [[key, _settings(group)] for key, group in keyed(one)],
            ]
            for one in self._optimizers
        ]

    def check_holds(
        self, parameters: Iterable[tuple[str, nn.Parameter]], rank: int
    ) -> None:
        """Raises unless the optimizers hold all parameters of this rank that learn.

        Args:
            parameters: of this rank, by the model's names.
            rank: for the message.

        Raises:
            ConfigError: one is missing.
        """
        held = {
            id(one)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for one in group["params"]
        }
        missing = [
            name
            for name, one in parameters
            if one.requires_grad and id(one) not in held
        ]
        if missing and self._optimizers:
            raise ConfigError(
                f"the optimizer of rank {rank} does not hold "
                f"{', '.join(missing[:_SHOWN])}{' and more' * (len(missing) > _SHOWN)}"
                ", which learn here; make it of pipe.parameters(), and give all "
                "optimizers if there are several"
            )

    def leaving(self, name: str, parameter: nn.Parameter) -> Moving:
        """A parameter with its group and state.

        Raises:
            ConfigError: its state cannot travel.
        """
        for index, optimizer in enumerate(self._optimizers):
            for key, group in keyed(optimizer):
                if any(one is parameter for one in group["params"]):
                    state = dict(optimizer.state.get(parameter, {}))
                    flatten(state, f"the {type(optimizer).__name__}'s state of {name}")
                    return Moving(name, (index, key), state)
        return Moving(name, None, {})

    def exchange(
        self,
        gone: Iterable[nn.Parameter],
        come: Sequence[tuple[nn.Parameter, Moving]],
        order: Sequence[nn.Parameter],
    ) -> None:
        """Lets go of parameters and takes others up.

        Args:
            gone: that this rank holds no more.
            come: that it has got.
            order: all that it has now, in the model's order, which groups follow.
        """
        lost = {id(one) for one in gone}
        at = {id(one): index for index, one in enumerate(order)}
        for index, optimizer in enumerate(self._optimizers):
            for one in [one for one in optimizer.state if id(one) in lost]:
                del optimizer.state[one]
            for key, group in keyed(optimizer):
                mine = [each for each in come if each[1].place == (index, key)]
                _refill(group, lost, mine, at)
                for parameter, moving in mine:
                    if moving.state:
                        optimizer.state[parameter] = _here(
                            moving.state, parameter, group
                        )


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


def pack_state(moving: Moving) -> tuple[list[Any], list[torch.Tensor]]:
    """A record as a message carries it: plain data, and tensors."""
    tensors, structure = flatten(moving.state, moving.name)
    return [moving.name, moving.place, structure], tensors


def unpack_state(packed: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Moving:
    """Reads what `pack_state` made."""
    name, place, structure = packed
    return Moving(name, place and tuple(place), unflatten(structure, tensors))


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
                f"{theirs.get(key)} on rank {rank}; a parameter that moves would learn "
                "otherwise"
            )


def _refill(
    group: dict[str, Any],
    lost: set[int],
    come: Sequence[tuple[nn.Parameter, Moving]],
    at: Mapping[int, int],
) -> None:
    """The parameters of a group, others than the pipeline's first."""
    names = group.get("param_names") or [""] * len(group["params"])
    held = [
        (one, name)
        for one, name in zip(group["params"], names, strict=True)
        if id(one) not in lost
    ]
    held += [(one, moving.name) for one, moving in come]
    held.sort(key=lambda each: at.get(id(each[0]), -1))
    group["params"] = [one for one, _ in held]
    if "param_names" in group:
        group["param_names"] = [name for _, name in held]


def _here(
    state: dict[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]
) -> dict[str, Any]:
    """State where the optimizer wants it, as torch's `load_state_dict` places it."""
    counts_there = bool(group.get("capturable") or group.get("fused"))
    return {
        key: value
        if key == "step" and not counts_there
        else map_tensors(value, lambda tensor: tensor.to(parameter.device))
        for key, value in state.items()
    }
