"""Checkpoint state of parameter averaging, in addition to the model.

A *committed state* is a rank's state at a synchronisation: it holds the common model,
and no reduction is in progress. In addition to model and optimizer it has the outer
momentum, equal on all ranks, and the codec's residual, local to each rank. With it a
run resumes bit-identically.

Encoded gradients have residuals alone. They form one group of all trained parameters,
in order of definition, because bucket layouts and ranks may differ at loading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import MismatchError

VERSION = 1
FLOAT = "float32"
GRADIENTS = "gradients"
"""Marker in place of the dtype in the state of gradients' residuals."""
_GROUP_KEYS = {"dtype", "numel", "momentum", "base", "residual"}


def check_alike(group: Group, state: dict[str, Any], problem: str) -> None:
    """Refuses a state that does not fit, or differs between ranks; collective.

    All ranks raise, so that no rank waits for a refused one.

    Args:
        group: process group of all ranks.
        state: state that this rank is about to load.
        problem: reason why this rank cannot load it; "" if it can.

    Raises:
        MismatchError: names the first rank that cannot load, and the reason.
    """
    word = f"!{problem}" if problem else _digest(state)
    words = [word]
    if group.world_size > 1:  # a rank by itself may have left its group
        words = gather_texts(group, word, "comparing what ranks load")
    for rank, each in enumerate(words):
        if each.startswith("!"):
            raise MismatchError(f"rank {rank} cannot load its state: {each[1:]}")
        if each != words[0]:
            raise MismatchError(
                f"rank {rank} loads an outer momentum or common parameters that "
                "differ from rank 0's; expected states that were saved together"
            )


def blank(layouts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Returns the state before the first reduction.

    Args:
        layouts: dtype and number of elements of each group of parameters.
    """
    nothing = {"momentum": None, "base": None, "residual": None}
    groups = [{"dtype": kind, "numel": numel, **nothing} for kind, numel in layouts]
    return {"version": VERSION, "groups": groups}


def misfit_of(state: object, layouts: Sequence[tuple[str, int]]) -> str:
    """Describes why a state does not fit; "" if it fits.

    Args:
        state: state to load, of any type.
        layouts: dtype and number of elements of each group of parameters.
    """
    if not isinstance(state, Mapping):
        return f"expected a state of averaging, got {type(state).__name__}"
    if state.get("version") != VERSION:
        return f"expected version {VERSION}, got {state.get('version')!r}"
    groups = state.get("groups")
    if not isinstance(groups, (list, tuple)) or len(groups) != len(layouts):
        return (
            f"expected {len(layouts)} groups of parameters, of "
            f"{', '.join(dtype for dtype, _ in layouts)}; the state is another model's"
        )
    for (dtype, numel), each in zip(layouts, groups, strict=True):
        is_mapping = isinstance(each, Mapping)
        if not is_mapping or set(each) != _GROUP_KEYS:
            got = sorted(map(str, each)) if is_mapping else type(each).__name__
            return (
                "expected groups of parameters with entries "
                f"{sorted(_GROUP_KEYS)}, got {got}"
            )
        if (each["dtype"], each["numel"]) != (dtype, numel):
            return (
                f"expected {numel} elements of {dtype}, got {each['numel']} of "
                f"{each['dtype']}; the state belongs to other parameters"
            )
        for name, kind in (("momentum", dtype), ("base", dtype), ("residual", FLOAT)):
            got = _described(each[name])
            is_rounded = name == "momentum" and got == f"[{numel}] of bfloat16"
            if got not in ("None", f"[{numel}] of {kind}") and not is_rounded:
                return f"expected a {name} of {numel} elements of {kind}, got {got}"
    return ""


def is_of_gradients(state: object) -> bool:
    """True if a state holds residuals of gradients."""
    groups = state.get("groups", ()) if isinstance(state, Mapping) else ()
    kinds = [isinstance(each, Mapping) and each.get("dtype") for each in groups]
    return kinds == [GRADIENTS]


def packed_residuals(
    parameters: Sequence[nn.Parameter], left: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Builds the state from residuals of gradients by parameter ID."""
    largest = max(parameter.numel() for parameter in parameters)
    zeros = torch.zeros(largest, dtype=torch.float32, device="cpu")
    parts = [left.get(id(p), zeros[: p.numel()]) for p in parameters]
    state = blank(_gradients(parameters))
    state["groups"][0]["residual"] = torch.cat(parts)
    return state


def unpacked_residuals(
    parameters: Sequence[nn.Parameter], state: dict[str, Any], group: Group
) -> dict[int, torch.Tensor]:
    """Returns residuals by parameter ID; a collective call.

    Raises:
        MismatchError: a rank's state does not fit its parameters.
    """
    check_alike(group, state, misfit_of(state, _gradients(parameters)))
    residual = state["groups"][0]["residual"]
    if residual is None:  # this rank did not exist at saving
        return {}
    parts = residual.split([p.numel() for p in parameters])
    return {id(p): part for p, part in zip(parameters, parts, strict=True)}


def _gradients(parameters: Sequence[nn.Parameter]) -> list[tuple[str, int]]:
    return [(GRADIENTS, sum(parameter.numel() for parameter in parameters))]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} of {dtype_name(value.dtype)}"
    return "None" if value is None else type(value).__name__


def _digest(state: dict[str, Any]) -> str:
    """Digest of the state common to all ranks; a missing momentum counts as zeros."""
    digest = hashlib.sha256()
    for each in state["groups"]:
        for name in ("momentum", "base"):
            value = each[name]
            digest.update(name.encode())
            if value is not None and bool(value.count_nonzero()):
                raw = value.detach().cpu().contiguous().view(torch.uint8)
                digest.update(raw.numpy())
    return digest.hexdigest()[:16]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
