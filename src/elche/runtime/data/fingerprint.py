"""A cheap fingerprint of samples, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

MOST_VALUES = 1024
"""Most values of a large tensor or text that are read, spread over it."""
MOST_DEPTH = 8
DIGEST_BYTES = 7


def fingerprint(sample: Any) -> int:
    """A number of 56 bits, equal for equal samples.

    Looks into containers, tensors, arrays, texts, numbers and plain objects; of what
    else a sample holds, only at the type. Of large tensors and texts it sees a part.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update("\n".join(_described(sample, 0)).encode(errors="replace"))
    return int.from_bytes(digest.digest(), "little")


def _described(value: Any, depth: int) -> list[str]:
    """Lines that tell a value from others."""
    kind = type(value).__qualname__
    if depth > MOST_DEPTH:
        return [kind]
    if value is None or isinstance(value, (bool, int, float, complex)):
        return [f"{kind} {value!r}"]
    if isinstance(value, (str, bytes, bytearray)):
        return [f"{kind} {len(value)} {value[:: _step(len(value))]!r}"]
    if isinstance(value, torch.Tensor):
        return [f"{kind} {list(value.shape)} {value.dtype}", *_values(value)]
    if hasattr(value, "reshape") and hasattr(value, "dtype"):
        return [f"{kind} {value.shape} {value.dtype}", *_values(value)]
    if callable(getattr(value, "tobytes", None)):
        return [kind, *_described(value.tobytes(), depth + 1)]
    items: list[Any]
    if isinstance(value, Mapping):
        items = [part for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    lines = [line for item in items for line in _described(item, depth + 1)]
    return [f"{kind} {len(items)}", *lines]


def _values(array: Any) -> list[str]:
    """Values of a tensor or array, a part of them if there are many."""
    try:
        flat = array.reshape(-1)
        return [repr(flat[:: _step(len(flat))].tolist())]
    except (RuntimeError, TypeError, NotImplementedError):
        return []  # sparse, nested or quantised: its kind and shape must do


def _step(length: int) -> int:
    return max(1, -(-length // MOST_VALUES))
