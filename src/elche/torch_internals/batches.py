"""Batches: nested values, moved to a device, and who loads them."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from elche.torch_internals.lookup import bind, has, refusing

Leaf = Callable[[Any], bool]


def _map(call: Callable[[Any], Any], tree: Any, is_leaf: Leaf | None = None) -> Any:
    if is_leaf is not None and is_leaf(tree):
        return call(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(call, item, is_leaf) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(call, item, is_leaf) for item in tree)
    if type(tree) in (dict, OrderedDict):
        pairs = ((key, _map(call, item, is_leaf)) for key, item in tree.items())
        return type(tree)(pairs)
    return call(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, tree)
    return found


_TREES = "looks into batches"
_PLAIN = "it looks into lists, tuples and dicts only"
tree_map: Callable[..., Any] = bind(
    "torch.utils._pytree.tree_map", "2.0", _TREES, _PLAIN, _map
)
tree_leaves: Callable[[Any], list[Any]] = bind(
    "torch.utils._pytree.tree_leaves", "2.2", _TREES, _PLAIN, _leaves
)


_HAS_WORKER_INFO = has(
    "torch.utils.data._utils.worker._worker_info",
    "2.0",
    "hides from a stream which loader worker reads it",
    "streams are refused in loader workers",
)


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Meanwhile `torch.utils.data.get_worker_info` knows of no worker.

    Raises:
        ConfigError: it cannot be hidden with this torch.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    if not _HAS_WORKER_INFO:
        refusing("torch.utils.data._utils.worker._worker_info", "set num_workers=0")()
    worker: Any = sys.modules[get_worker_info.__module__]
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
