"""Checkpoint state of encoded gradients' residuals, in the averager's format.

All trained parameters form one group, in order of definition, because bucket layouts
and ranks may differ when the state is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.averaging.averager_state import blank, check_alike, misfit_of
from elche.comm.transport.process_group import Group

KIND = "gradients"
"""Marker in place of the dtype in the state of averaged parameters."""


def is_of_gradients(state: object) -> bool:
    """True if a state holds residuals of gradients."""
    groups = state.get("groups", ()) if isinstance(state, Mapping) else ()
    kinds = [isinstance(each, Mapping) and each.get("dtype") for each in groups]
    return kinds == [KIND]


def packed(
    parameters: Sequence[nn.Parameter], left: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Builds the state from residuals by parameter ID."""
    state = blank(_layouts(parameters))
    total = sum(p.numel() for p in parameters)
    flat = torch.zeros(total, dtype=torch.float32, device="cpu")
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if id(parameter) in left:
            part.copy_(left[id(parameter)])
    state["groups"][0]["residual"] = flat
    return state


def unpacked(
    parameters: Sequence[nn.Parameter], state: dict[str, Any], group: Group
) -> dict[int, torch.Tensor]:
    """Returns residuals by parameter ID; a collective call.

    Raises:
        MismatchError: a rank's state does not fit its parameters.
    """
    check_alike(group, state, misfit_of(state, _layouts(parameters)))
    residual = state["groups"][0]["residual"]
    if residual is None:  # this rank did not exist at saving
        return {}
    parts = residual.split([p.numel() for p in parameters])
    return {id(p): part for p, part in zip(parameters, parts, strict=True)}


def _layouts(parameters: Sequence[nn.Parameter]) -> list[tuple[str, int]]:
    return [(KIND, sum(parameter.numel() for parameter in parameters))]
