"""Copies of state in host memory, and the state of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elche.checkpoint.manifest import MODEL_FILE, SHARED
from elche.checkpoint.state_tree import Json, StateTree, encode
from elche.devices import choice
from elche.devices import random_state as devices

Encoded: TypeAlias = tuple[Json, dict[str, Tensor]]
"""Result of `encode`: the JSON tree, and its tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Copies of a rank's state for the writer.

    Attributes:
        own: state that only this rank holds.
        shared: state common to all ranks; empty except on rank 0.
        model: model tensors; {} except on rank 0. In a pipeline, this rank's layers.
        model_file: file name for the model tensors.
    """

    own: Encoded
    shared: Encoded
    model: dict[str, Tensor]
    model_file: str = MODEL_FILE

    @staticmethod
    def of(
        own: StateTree,
        shared: StateTree,
        model: Mapping[str, Tensor],
        model_file: str = MODEL_FILE,
    ) -> Captured:
        """Encodes state and copies its tensors, so that training cannot change them.

        If one file holds the whole model, tensors that the shared state has in common
        with the model are stored once.

        Raises:
            ConfigError: a value cannot be stored; the message names it.
        """
        own_tree, own_tensors = encode(own, "own")
        tree, tensors = encode(
            shared, SHARED, model if model_file == MODEL_FILE else None
        )
        return Captured(
            own=(own_tree, on_host(own_tensors)),
            shared=(tree, on_host(tensors)),
            model=on_host(model),
            model_file=model_file,
        )


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the CPU."""
    return {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}


def random_state(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Returns the random states of Python, torch, numpy and the named generators."""
    numpy = sys.modules.get("numpy")
    kind, own, gauss = random.getstate()
    return {
        "python": [kind, torch.tensor(own, dtype=torch.int64, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
        "device": devices.saved_state(),
        "numpy": None if numpy is None else numpy.random.get_state(legacy=True),
        "generators": {name: each.get_state() for name, each in generators.items()},
    }


def restore_random(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator]
) -> None:
    """Restores the states of all generators that exist in this process."""
    kind, own, gauss = state["python"]
    random.setstate((kind, tuple(own.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    was_cuda = {"type": choice.NVIDIA, "state": state.get(choice.NVIDIA)}  # until 0.1
    devices.restore_saved(state.get("device", was_cuda))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(state["numpy"])
    for name, each in generators.items():
        if name in state["generators"]:
            each.set_state(state["generators"][name])
