"""Lossless conversion of nested state to JSON and tensors, without pickle.

A node of a type that JSON lacks is an object whose key ``$`` names the type. All other
nodes are stored as they are.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from elche.checkpoint.files import name_of
from elche.errors import CheckpointError, ConfigError

StateTree: TypeAlias = Any
"""Dicts, lists, tuples, numbers, strings, bytes, None, tensors, arrays; nested."""
Json: TypeAlias = Any

KIND: Final = "$"
MOST_DEPTH: Final = 100
MODEL: Final = "model"
"""Marker of a tensor stored in the model's own file."""
_TAKEN = (
    "dicts with keys of str, int and the like, lists, tuples, bool, int, float, "
    "complex, str, bytes, None, dense tensors, numpy arrays and numbers"
)
_PLAIN_KEYS = (str, int, float, bool, type(None), bytes)
_DICTS: Final[dict[type, str]] = {
    defaultdict: "dict",  # without its factory, which the owner recreates
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}
_LISTS: Final[dict[type, str]] = {tuple: "tuple", torch.Size: "size"}
_CONTAINERS: Final = {name: kind for kind, name in {**_DICTS, **_LISTS}.items()}


def encode(
    tree: StateTree, path: str = "state", model: Mapping[str, Tensor] | None = None
) -> tuple[Json, dict[str, Tensor]]:
    """Splits a state tree into JSON and tensors.

    Args:
        tree: state to store.
        path: name of the tree, used in errors and as prefix of tensor names.
        model: tensors that are stored elsewhere and only referenced by name.

    Returns:
        The tree as JSON, and its tensors by name. A tensor that occurs several times
        is stored once and referenced by that name.

    Raises:
        ConfigError: the tree holds an unsupported value; the message names its place.
    """
    encoder = _Encoder(model or {})
    return encoder.node(tree, path, 0), encoder.tensors


def decode(node: Json, tensor: Callable[[str, bool], Tensor]) -> StateTree:
    """Rebuilds a state tree.

    Args:
        node: JSON from :func:`encode`.
        tensor: returns a tensor by name; True: from the model's file, False: from the
            tree's own.

    Raises:
        CheckpointError: this version of elche does not write such a tree.
    """
    try:
        return _decode(node, tensor)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"expected a state as elche writes it, got one with {error!r}"
        ) from error


@final
class _Encoder:
    """Encoder of one tree, and the tensors found so far, by name."""

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known = {
            key: (MODEL, name)
            for name, value in model.items()
            if (key := _memory(value)) is not None
        }

    def node(self, value: Any, path: str, depth: int) -> Json:
        if depth > MOST_DEPTH:
            raise ConfigError(
                f"{path}: expected a state of at most {MOST_DEPTH} levels, got more; "
                "does it contain itself?"
            )
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else _kind("float", repr(value))
        if kind is complex:
            return _kind("complex", [repr(value.real), repr(value.imag)])
        if kind is bytes:
            return _kind("bytes", base64.b64encode(value).decode())
        if kind is list or kind in _LISTS:
            items = [
                self.node(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(value)
            ]
            return _kind(_LISTS[kind], items) if kind in _LISTS else items
        if kind in _DICTS:
            return self._dict(value, path, depth)
        if isinstance(value, torch.dtype | torch.device):
            return _kind(kind.__name__, name_of(value))
        return self._numbers(value, path)

    def _numbers(self, value: Any, path: str) -> Json:
        plain = value.detach() if isinstance(value, Tensor) else None
        if type(plain) is Tensor:  # also of a parameter
            return self._tensor(plain, path)
        if (
            isinstance(value, np.generic | np.ndarray)
            and value.dtype.kind in "biufcSU"
            and value.dtype.itemsize
        ):
            array = np.asarray(value)
            flat = np.frombuffer(bytearray(array.tobytes()), dtype=np.uint8)
            node = _kind("array", self._name(torch.from_numpy(flat), path))
            node |= {"dtype": array.dtype.str, "shape": list(array.shape)}
            return node | {"scalar": True} if isinstance(value, np.generic) else node
        raise ConfigError(
            f"{path}: expected {_TAKEN}, got a {type(value).__qualname__}; let "
            "state_dict() return it as these"
        )

    def _tensor(self, value: Tensor, path: str) -> Json:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = "quantized" if value.is_quantized else f"{value.layout}"
            raise ConfigError(
                f"{path}: expected a dense tensor with values, got a {what} one on "
                f"{value.device}; store what it is made of"
            )
        key = _memory(value)
        if key is not None and key in self._known:
            where, name = self._known[key]
        else:
            where, name = "", self._name(value, path)
            if key is not None:
                self._known[key] = where, name
        node = _kind("tensor", name)
        node |= {"dtype": name_of(value.dtype), "shape": list(value.shape)}
        return node | {"in": where} if where else node

    def _name(self, value: Tensor, path: str) -> str:
        name, number = path, 2
        while name in self.tensors:  # keys may hold dots
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = value
        return name

    def _dict(self, value: Mapping[Any, Any], path: str, depth: int) -> Json:
        for key in value:
            if type(key) not in _PLAIN_KEYS:
                raise ConfigError(
                    f"{path}: expected keys of str, int and the like, got the key "
                    f"{key!r}, a {type(key).__qualname__}"
                )
        items = {
            key: self.node(item, f"{path}.{key}", depth + 1)
            for key, item in value.items()
        }
        is_plain = KIND not in items and all(type(key) is str for key in items)
        kind = _DICTS[type(value)]
        if kind == "dict" and is_plain:
            return items
        pairs = [[self.node(key, path, depth), item] for key, item in items.items()]
        return _kind(kind, pairs)


def _decode(node: Json, tensor: Callable[[str, bool], Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    if KIND not in node:
        return {key: _decode(item, tensor) for key, item in node.items()}
    kind, value = node[KIND], node["value"]
    if kind in _LISTS.values():
        return _CONTAINERS[kind]([_decode(item, tensor) for item in value])
    if kind in _DICTS.values():
        whole = _CONTAINERS[kind]()
        for key, item in value:
            whole[_decode(key, tensor)] = _decode(item, tensor)
        return whole
    if kind == "tensor":
        found = tensor(value, node.get("in") == MODEL)
        dtype = _dtype(node["dtype"])
        found = found if found.dtype == dtype else found.view(dtype)
        return found.reshape(node["shape"])
    if kind == "array":
        flat = tensor(value, False).numpy().view(np.dtype(node["dtype"]))
        array = flat.reshape(node["shape"])
        return array[()] if node.get("scalar") else array
    return _SCALARS[kind](value)


def _kind(kind: str, value: Json) -> dict[str, Json]:
    return {KIND: kind, "value": value}


def _memory(value: Tensor) -> tuple[Any, ...] | None:
    """Key of a tensor's memory, equal for equal views; None for empty tensors."""
    if value.layout != torch.strided or value.is_meta or not value.numel():
        return None
    flags = (value.is_conj(), value.is_neg())
    place = (value.device, value.data_ptr(), value.dtype)
    return (*place, tuple(value.shape), value.stride(), flags)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


_SCALARS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "complex": lambda value: complex(*map(float, value)),
    "bytes": partial(base64.b64decode, validate=True),
    "dtype": _dtype,
    "device": torch.device,
}
"""Decoders of scalar types that JSON lacks, by kind."""
