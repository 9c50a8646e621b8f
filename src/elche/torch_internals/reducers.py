"""The reducer behind torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elche.torch_internals.lookup import REFUSED, bind, refusing

_REDUCER = "torch.distributed.Reducer"
_ZEROS = f"{_REDUCER}._get_zeros_like_grad_buckets"
_PUSH = f"{_REDUCER}._push_all_rebuilt_params"

rebuild_buckets: Callable[[Any], bool] = bind(
    f"{_REDUCER}._rebuild_buckets",
    "2.0",
    "orders buckets as gradients appear, at the end of the first backward pass",
    "torch does so in the next forward pass, which then waits for all ranks",
    lambda reducer: False,
)
zero_buckets: Callable[[Any], list[Any]] = bind(
    _ZEROS, "2.0", "reduces without a backward pass", REFUSED, refusing(_ZEROS)
)
push_all_rebuilt: Callable[[Any], None] = bind(
    _PUSH, "2.0", "reduces without a backward pass", REFUSED, refusing(_PUSH)
)

COMM_HOOKS = "_comm_hooks"
"""Attribute of torch's wrapper with the registered hooks, which a copy has not. Since
2.0.
"""
