"""Optimizer state by parameter name, for any partition, schedule and number of ranks.

The form is torch's, with names in the place of numbers::

    {"state": {"0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"lr": ..., "params": ["0.weight", ...]}, ...]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.layer_state import few
from elche.pipeline.optimizers import NOT_SETTINGS, keyed
from elche.pipeline.trees import map_tensors

NamedState = dict[str, Any]
Names = Mapping[int, Sequence[str]]
"""By its id, all names of a parameter of this rank, the same one first everywhere."""


def named_state(optimizer: torch.optim.Optimizer, names: Names) -> NamedState:
    """State of an optimizer, by the parameters' names.

    Args:
        optimizer: over parameters of this rank.
        names: of those.

    Raises:
        ConfigError: it holds a parameter that is none of this rank's.
    """
    states: dict[str, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        named = [(_names(names, one, optimizer)[0], one) for one in group["params"]]
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
    """The state of the whole model from those of all ranks, in their order."""
    states: dict[str, Any] = {}
    groups: dict[int | str, dict[str, Any]] = {}
    for part in parts:
        states = {**part["state"], **states}
        for key, group in keyed(part["param_groups"]):
            held = groups.setdefault(key, {**group, "params": []})
            held["params"] += [n for n in group["params"] if n not in held["params"]]
    return {"state": states, "param_groups": list(groups.values())}


def part_of(saved: NamedState, names: set[str]) -> NamedState:
    """The part of a state that is about these parameters."""
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
    """Loads this rank's part of a state by name; settings of groups as well.

    Args:
        optimizer: over parameters of this rank, with the groups of the one saved.
        names: of its parameters.
        saved: of at least this rank's parameters.

    Raises:
        ConfigError: this is no such state.
        MismatchError: it has other groups, not all of these parameters, or has them in
            other groups; nothing was loaded.
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
    # Copies, which later steps may change: a state may be loaded twice.
    copied = map_tensors(list(states.values()), torch.clone)
    own = dict(zip(states, copied, strict=True))
    optimizer.load_state_dict({"state": own, "param_groups": whole["param_groups"]})
