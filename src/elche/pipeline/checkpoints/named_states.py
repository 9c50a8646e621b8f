"""Optimizers over a pipeline's parameters: agreement of ranks, and state by name.

Parameter groups of different ranks match by ``name`` if all groups of an optimizer have
one, else by position. All ranks must have the same groups with the same settings,
including empty ones. The state loads under any partition, schedule and number of ranks.

The format is torch's, with names in place of numbers::

    {"state": {"0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"lr": ..., "params": ["0.weight", ...]}, ...]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.trees import map_tensors

SHOWN = 3
NamedState = dict[str, Any]
Names = Mapping[int, Sequence[str]]
"""All names of this rank's parameters, by id, in the same order on all ranks."""


GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
NOT_SETTINGS = ("params", "param_names")


class Placeholder(nn.Parameter):
    """Dummy parameter for a rank without any: optimizers refuse an empty list."""


def only_optimizer(given: Any) -> torch.optim.Optimizer:
    """Checks and returns a single optimizer."""
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            "expected one torch optimizer over this rank's parameters, got "
            f"{type(given).__name__}; call this once per optimizer"
        )
    return as_optimizers(given)[0]


def as_optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Checks and returns one or several optimizers as a tuple."""
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
    """Classes, groups and settings of optimizers, which must agree between ranks."""
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


def check_alike(reports: Sequence[Mapping[str, str]]) -> None:
    """Raises unless all ranks have the same optimizers with the same groups."""
    for rank, theirs in enumerate(reports):
        for place in dict.fromkeys((*reports[0], *theirs)):
            mine, other = reports[0].get(place), theirs.get(place)
            if mine != other:
                raise MismatchError(
                    f"ranks disagree about {place}: rank 0 has {mine}, rank {rank} "
                    f"has {other}; give the same optimizers in the same order, with "
                    "the same groups and settings, on every rank; where a rank has no "
                    "parameters of a group, leave the group empty"
                )


def keyed(groups: Sequence[dict[str, Any]]) -> list[tuple[int | str, dict[str, Any]]]:
    """Groups of an optimizer or state: by name if all have one, else by position."""
    names = [group.get("name") for group in groups]
    if len(set(names)) == len(groups) and all(isinstance(one, str) for one in names):
        return [(group["name"], group) for group in groups]
    return list(enumerate(groups))


def named_state(optimizer: torch.optim.Optimizer, names: Names) -> NamedState:
    """State of an optimizer by parameter name."""
    states: dict[str, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        held = [one for one in group["params"] if not isinstance(one, Placeholder)]
        named = [(_names(names, one, optimizer)[0], one) for one in held]
        states |= {
            name: dict(optimizer.state[one])
            for name, one in named
            if optimizer.state.get(one)
        }
        settings = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
        groups.append({**settings, "params": [name for name, _ in named]})
    return {"state": states, "param_groups": groups}


def _names(
    names: Names, parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> Sequence[str]:
    if id(parameter) not in names:
        raise ConfigError(
            f"the {type(optimizer).__name__} holds a parameter that no layer of this "
            "rank has: make it of pipe.parameters()"
        )
    return names[id(parameter)]


def join_states(parts: Iterable[NamedState]) -> NamedState:
    """Joins the states of all ranks into the whole model's, in rank order."""
    states: dict[str, Any] = {}
    groups: dict[int | str, dict[str, Any]] = {}
    for part in parts:
        states = {**part["state"], **states}
        for key, group in keyed(part["param_groups"]):
            held = groups.setdefault(key, {**group, "params": []})
            held["params"] += [n for n in group["params"] if n not in held["params"]]
    return {"state": states, "param_groups": list(groups.values())}


def part_of(saved: NamedState, names: set[str]) -> NamedState:
    """Part of a state that belongs to the named parameters."""
    return {
        "state": {n: one for n, one in saved["state"].items() if n in names},
        "param_groups": [
            {**group, "params": [n for n in group["params"] if n in names]}
            for group in saved["param_groups"]
        ],
    }


def load_named_state(
    optimizer: torch.optim.Optimizer, names: Names, saved: NamedState
) -> None:
    """Loads this rank's part of a state by name, including settings of groups.

    Raises:
        ConfigError: `saved` is not such a state.
        MismatchError: the state has other groups, lacks a parameter, or has it in
            another group; nothing was loaded.
    """
    if not isinstance(saved, Mapping) or set(saved) != {"state", "param_groups"}:
        raise ConfigError(
            "expected what pipe.optimizer_state_dict returns, with the entries state "
            f"and param_groups, got a {type(saved).__name__}"
        )
    there, here = dict(keyed(saved["param_groups"])), keyed(optimizer.param_groups)
    if set(there) != {key for key, _ in here}:
        raise MismatchError(
            f"the state has the groups {sorted(there, key=str)}, the "
            f"{type(optimizer).__name__} of this rank "
            f"{sorted((key for key, _ in here), key=str)}; make the same groups"
        )
    whole = optimizer.state_dict()
    states, missing = {}, []
    for (key, group), packed in zip(here, whole["param_groups"], strict=True):
        held = set(there[key]["params"])
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            if isinstance(parameter, Placeholder):
                continue
            known = _names(names, parameter, optimizer)
            name = next((one for one in known if one in held), None)
            if name is None:
                missing.append(f"{known[0]} in group {key}")
            elif name in saved["state"]:
                states[index] = saved["state"][name]
        kept = {k: v for k, v in packed.items() if k in NOT_SETTINGS}
        packed.update({k: v for k, v in there[key].items() if k != "params"} | kept)
    if missing:
        raise MismatchError(
            f"the optimizer's state has no {few(missing)}; load the state of this "
            "model, with the same parameters in the same groups"
        )
    # Clones, since later steps modify the state: a state may be loaded twice.
    copied = map_tensors(list(states.values()), torch.clone)
    own = dict(zip(states, copied, strict=True))
    optimizer.load_state_dict({"state": own, "param_groups": whole["param_groups"]})


def few(names: Sequence[str]) -> str:
    """The first names of a list, and the number of the others."""
    left = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {left} more" if left > 0 else "")
