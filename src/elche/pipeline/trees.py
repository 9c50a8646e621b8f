"""Nested values of tensors and plain data: flattened, rebuilt, cut, joined.

A stage may accept and return tensors, and tuples, lists and dicts of tensors and plain
values (None, numbers, text). Structure and plain values are sent as msgpack; nothing is
ever unpickled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elche.errors import ConfigError
from elche.torch_internals.batches import (
    tree_flatten_with_path,
    tree_map,
    tree_map_with_path,
)

_PLAIN = (bool, int, float, str, bytes)


def as_tensors(value: Any, where: str, is_cut: bool = True) -> Any:
    """Converts arrays, such as NumPy's, to tensors that share their memory."""
    if isinstance(value, torch.Tensor):
        if is_cut and not _is_dense(value):
            raise ConfigError(
                f"{where} holds a tensor of layout {value.layout}, which cannot be cut "
                "into microbatches; expected dense ones, see to_dense() and "
                "to_padded_tensor()"
            )
        if is_cut and value.is_meta:
            raise ConfigError(
                f"{where} holds a tensor on the meta device, without values"
            )
        return value
    if value is None or isinstance(value, _PLAIN):
        return value
    if type(value) in (tuple, list):
        return type(value)(as_tensors(one, where, is_cut) for one in value)
    if type(value) is dict:
        return {key: as_tensors(one, where, is_cut) for key, one in value.items()}
    if isinstance(value, (tuple, list, Mapping)):
        raise ConfigError(
            f"{where} holds a {type(value).__name__}; expected plain tuples, lists and "
            "dicts: pass tuple(...) or dict(...) of it"
        )
    if hasattr(value, "__array__"):
        try:
            return torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{where} holds a {type(value).__name__} that is no tensor: {error}"
            ) from error
    return value


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def flatten(value: Any, where: str) -> tuple[list[torch.Tensor], Any]:
    """Flattens a nested value into tensors and a structure for :func:`unflatten`."""
    tensors: list[torch.Tensor] = []
    return tensors, _structure(value, tensors, where)


def _structure(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["t"]
    if value is None or isinstance(value, _PLAIN):
        return ["v", value]
    if type(value) in (tuple, list):
        name = "tuple" if type(value) is tuple else "list"
        return [name, [_structure(one, tensors, where) for one in value]]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        parts = [_structure(one, tensors, where) for one in value.values()]
        return ["dict", list(value), parts]
    raise ConfigError(
        f"{where} holds a {type(value).__name__}, which stages cannot send; "
        "expected tensors, None, numbers and text, in tuples, lists and dicts with "
        "text keys"
    )


def unflatten(structure: Any, tensors: Iterable[Any]) -> Any:
    """Rebuilds a value from the result of :func:`flatten`."""
    kind, left = structure[0], iter(tensors)
    if kind == "t":
        return next(left)
    if kind == "v":
        return structure[1]
    parts = [unflatten(one, left) for one in structure[-1]]
    if kind == "dict":
        return dict(zip(structure[1], parts, strict=True))
    return tuple(parts) if kind == "tuple" else parts


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies a function to each tensor of a nested value; keeps other values."""
    return tree_map(
        lambda one: function(one) if isinstance(one, torch.Tensor) else one, value
    )


def named_tensors(value: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """Tensors with dimensions, by key or position in the outermost value."""
    return [
        (prefix + _name(path), one)
        for path, one in tree_flatten_with_path(value)[0]
        if isinstance(one, torch.Tensor) and one.dim()
    ]


def _name(path: Sequence[Any]) -> str:
    place: Any = path[0] if path else None
    return str(getattr(place, "key", getattr(place, "idx", "")))


def batch_samples(value: Any) -> int | None:
    """Number of samples of a batch: first dimension of its first nonscalar tensor."""
    return next((one.shape[0] for _, one in named_tensors(value)), None)


def split_batch(
    value: Any, sizes: Sequence[int], whole: Container[str] = (), prefix: str = ""
) -> list[Any]:
    """Cuts a batch into microbatches.

    Args:
        value: nested value. Dense tensors whose first dimension is the batch are cut
            along it; other values go to every microbatch.
        sizes: samples of each microbatch.
        whole: names (see `named_tensors`) of values that every microbatch gets uncut.
        prefix: prefix of the names in `whole`.
    """
    total = sum(sizes)

    def part(path: Sequence[Any], one: Any, begin: int, end: int) -> Any:
        is_batch = isinstance(one, torch.Tensor) and one.dim() and _is_dense(one)
        if not is_batch or one.shape[0] != total or prefix + _name(path) in whole:
            return one
        return one[begin:end]

    ends = itertools.accumulate(sizes)
    return [
        tree_map_with_path(partial(part, begin=end - size, end=end), value)
        for size, end in zip(sizes, ends, strict=True)
    ]


def as_plain(value: Any) -> Any:
    """Converts a nested value, such as a model's output, to tuples, lists, dicts."""
    if isinstance(value, (tuple, list)):
        items = [as_plain(one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: as_plain(one) for key, one in value.items()}
    return value


def join_batches(parts: Sequence[Any]) -> Any:
    """Joins microbatches of equal structure, as returned by `as_plain`."""

    def joined(first: Any, *others: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return first
        join = torch.cat if first.dim() else torch.stack
        return join([first, *others])

    return tree_map(joined, *parts)
