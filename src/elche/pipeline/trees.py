"""Nested values of tensors and plain data: taken apart, put together, cut, joined.

A stage may take and return tensors, and tuples, lists and dicts of them with plain
values (None, numbers, text) in between. Structure and plain values travel as data that
msgpack can write; nothing is ever unpickled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elche.errors import ConfigError
from elche.torch_internals.batches import tree_leaves, tree_map

_PLAIN = (bool, int, float, str, bytes)


def as_tensors(value: Any, where: str, is_cut: bool = True) -> Any:
    """The same nesting with arrays (NumPy's, say) as tensors; they share memory.

    Args:
        value: what a script gives.
        where: for the message.
        is_cut: whether every tensor must be one that can be cut.

    Raises:
        ConfigError: it holds an array that is not numeric, a tensor that is not dense
            or has no values, or a container of another type, which would not be cut.
    """
    if isinstance(value, torch.Tensor):
        if is_cut:
            _check_dense(value, where)
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


def _check_dense(tensor: torch.Tensor, where: str) -> None:
    if not _is_dense(tensor):
        raise ConfigError(
            f"{where} holds a tensor of layout {tensor.layout}, which cannot be cut "
            "into microbatches; expected dense ones, see to_dense() and "
            "to_padded_tensor()"
        )
    if tensor.is_meta:
        raise ConfigError(f"{where} holds a tensor on the meta device, without values")


def flatten(value: Any, where: str) -> tuple[list[torch.Tensor], Any]:
    """Takes a nested value apart.

    Args:
        value: what a stage returned, say.
        where: for the message.

    Returns:
        Its tensors, and a structure to put them back with :func:`unflatten`.

    Raises:
        ConfigError: a value that cannot travel is among it.
    """
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
        f"{where} holds a {type(value).__name__}, which cannot travel between stages; "
        "expected tensors, None, numbers and text, in tuples, lists and dicts with "
        "text keys"
    )


def unflatten(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Puts together what :func:`flatten` took apart."""
    return _rebuild(structure, iter(tensors))


def _rebuild(structure: Any, tensors: Any) -> Any:
    kind = structure[0]
    if kind == "t":
        return next(tensors)
    if kind == "v":
        return structure[1]
    if kind == "dict":
        parts = [_rebuild(one, tensors) for one in structure[2]]
        return dict(zip(structure[1], parts, strict=True))
    parts = [_rebuild(one, tensors) for one in structure[1]]
    return tuple(parts) if kind == "tuple" else parts


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting with a function of each tensor; other values stay."""
    return tree_map(
        lambda one: function(one) if isinstance(one, torch.Tensor) else one, value
    )


def batch_samples(value: Any) -> int | None:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    tensors = (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
    return next((one.shape[0] for one in tensors if one.dim()), None)


def split_batch(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a batch into microbatches.

    Args:
        value: nested; dense tensors whose first dimension is the batch are cut along
            it, anything else goes to every microbatch.
        sizes: samples of each microbatch.
    """
    total = sum(sizes)

    def part(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        is_cut = tensor.dim() and _is_dense(tensor) and tensor.shape[0] == total
        return tensor[begin:end] if is_cut else tensor

    ends = itertools.accumulate(sizes)
    return [
        map_tensors(value, partial(part, begin=end - size, end=end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def as_plain(value: Any) -> Any:
    """The same nesting in plain tuples, lists and dicts: a model's output, say."""
    if isinstance(value, (tuple, list)):
        items = [as_plain(one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: as_plain(one) for key, one in value.items()}
    return value


def join_batches(parts: Sequence[Any]) -> Any:
    """Puts microbatches of one structure together, as `as_plain` gives them."""

    def joined(first: Any, *others: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return first
        join = torch.cat if first.dim() else torch.stack
        return join([first, *others])

    return tree_map(joined, *parts)
