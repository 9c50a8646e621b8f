"""Copies of state to host memory, and the random generators of a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elche.checkpoint.manifest import MODEL_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Copies for the writer.

    Attributes:
        own: what only this rank holds.
        shared: what all hold in common; {} but on rank 0.
        model: the model alone; {} but on rank 0. Of a pipeline, this rank's layers.
        model_file: where that goes.
    """

    own: dict[str, Any]
    shared: dict[str, Any]
    model: dict[str, Tensor]
    model_file: str = MODEL_FILE


def copied(tree: Any) -> Any:
    """The same state with tensors of its own, on the CPU; nothing of it moves on.

    A tensor that occurs twice is copied once.
    """
    return _copied(tree, {})


def _copied(tree: Any, done: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        where = tree.data_ptr(), tree.shape, tree.stride(), tree.dtype, tree.device
        key = (*where, id(tree) if not tree.numel() else 0)
        if key not in done:
            done[key] = tree.detach().to("cpu", copy=True)
        return done[key]
    if isinstance(tree, Mapping):
        held = {name: _copied(value, done) for name, value in tree.items()}
        return held if type(tree) is dict else _same_kind(tree, held)
    if isinstance(tree, list):
        return [_copied(value, done) for value in tree]
    if type(tree) is tuple:
        return tuple(_copied(value, done) for value in tree)
    copy = getattr(tree, "copy", None)  # of numpy
    return copy() if callable(copy) and hasattr(tree, "dtype") else tree


def _same_kind(tree: Mapping[Any, Any], held: dict[Any, Any]) -> Any:
    try:
        return type(tree)(held)  # type: ignore[call-arg]
    except TypeError:
        return held


def random_state(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Generator states of Python, torch and numpy, and of generators by name."""
    numpy = sys.modules.get("numpy")
    kind, own, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state() if _has_cuda() else None
    return {
        "python": [kind, torch.tensor(own, dtype=torch.int64, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": None if numpy is None else numpy.random.get_state(legacy=True),
        "generators": {name: each.get_state() for name, each in generators.items()},
    }


def restore_random(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator]
) -> None:
    """Puts every generator where it was, as far as it is here again."""
    kind, own, gauss = state["python"]
    random.setstate((kind, tuple(own.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and _has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(state["numpy"])
    for name, each in generators.items():
        if name in state["generators"]:
            each.set_state(state["generators"][name])


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
