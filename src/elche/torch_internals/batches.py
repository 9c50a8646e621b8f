"""Batches: traversal of nested values, and the data loader's worker info."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from elche.torch_internals.lookup import bind

tree_map: Callable[..., Any] = bind(
    "torch.utils._pytree.tree_map", "looks into batches"
)
tree_leaves: Callable[[Any], list[Any]] = bind(
    "torch.utils._pytree.tree_leaves", "looks into batches"
)
tree_map_with_path: Callable[..., Any] = bind(
    "torch.utils._pytree.tree_map_with_path", "looks into batches"
)
tree_flatten_with_path: Callable[[Any], tuple[list[Any], Any]] = bind(
    "torch.utils._pytree.tree_flatten_with_path", "looks into batches"
)

tree_structure: Callable[[Any], Any] = bind(
    "torch.utils._pytree.tree_structure", "compares outputs of a model"
)


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Makes `torch.utils.data.get_worker_info` return None within the block."""
    info = get_worker_info()
    if info is None:
        yield
        return
    worker: Any = sys.modules[get_worker_info.__module__]
    assert worker._worker_info is info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
