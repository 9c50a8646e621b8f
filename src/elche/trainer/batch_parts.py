"""Parts of a batch, whatever holds it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from elche.errors import ConfigError
from elche.torch_internals.batches import tree_leaves, tree_map


def cut_batch(batch: Any, start: int, stop: int, length: int) -> Any:
    """Samples ``start`` to ``stop`` of everything in a batch of ``length``.

    Tensors are cut along dimension 0, and so are lists and tuples that hold one thing
    per sample and no tensor. Single numbers, texts and tensors of no dimension belong
    to every sample.

    Raises:
        ConfigError: something in it has another length, or cannot be cut.
    """

    def is_whole(item: Any) -> bool:
        is_rows = isinstance(item, (list, tuple)) and len(item) == length
        return is_rows and not any(
            isinstance(leaf, torch.Tensor) for leaf in tree_leaves(item)
        )

    def cut(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dim():
            if len(item) != length:
                raise ConfigError(
                    f"expected every tensor to have {length} samples in dimension 0, "
                    f"got {list(item.shape)}"
                )
            return item[start:stop]
        if isinstance(item, (list, tuple)):
            return item[start:stop]
        if isinstance(item, Mapping):  # one that torch does not look into
            same: Any = copy.copy(item)
            same.update(
                {key: cut_batch(item[key], start, stop, length) for key in item}
            )
            return same
        if item is None or isinstance(item, (torch.Tensor, str, bytes, int, float)):
            return item
        raise ConfigError(
            f"expected tensors in tuples, lists or dicts, got {type(item).__name__}"
        )

    return tree_map(cut, batch, is_leaf=is_whole)
