"""Arguments of `elche.DistributedDataParallel`, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from elche.errors import ConfigError

MIB = 2**20
LEAST_CAP_MB, MOST_CAP_MB = 2.0, 25.0
BUCKETS_AIMED_AT = 16
_IN_ORDER = "leave it out: buckets are sent in the order in which gradients appear"
REFUSED = {
    "codec": "compress gradients by register_comm_hook and a hook of torch's "
    "(ddp_comm_hooks.default_hooks.bf16_compress_hook, say), or train with "
    "elche.setup(..., codec=...)",
    "delay_all_reduce_named_params": _IN_ORDER,
    "device_mesh": "give process_group=mesh.get_group()",
    "mixed_precision": "run the model under torch.autocast",
    "param_to_hook_all_reduce": _IN_ORDER,
}
"""Arguments that are refused unless they ask for nothing, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """Settings that all ranks share; see `elche.DistributedDataParallel`.

    Raises:
        ConfigError: a value is not one of those allowed.
    """

    loss_reduction: Literal["mean", "sum"]
    weight_by: Literal["samples", "ranks"]
    strategy: Literal["overlapped", "synchronous", "none"]
    transport: Literal["auto", "gloo"]
    find_unused_parameters: bool
    static_graph: bool
    keeps_buffers: bool
    bucket_cap_mb: float | None

    def __post_init__(self) -> None:
        allowed = {
            "loss_reduction": ("mean", "sum"),
            "weight_by": ("samples", "ranks"),
            "strategy": ("overlapped", "synchronous", "none"),
            "transport": ("auto", "gloo"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"expected {name} to be one of {', '.join(choices)}; "
                    f"got {getattr(self, name)!r}"
                )
        cap = self.bucket_cap_mb
        if cap is not None and not (math.isfinite(cap) and cap >= 0):
            raise ConfigError(f"expected bucket_cap_mb of 0 or more, got {cap!r}")


def refuse_arguments(given: dict[str, Any]) -> None:
    """Refuses arguments that would reduce gradients in another way.

    Raises:
        ConfigError: names one, and what to do instead.
    """
    for name, instead in REFUSED.items():
        value = given.pop(name, None)
        asks_nothing = value is None or value is False
        if not asks_nothing and (name, value) != ("codec", "fp32"):
            raise ConfigError(
                f"elche.DistributedDataParallel has no argument {name}; {instead}"
            )


def cap_mb(trained: Iterable[nn.Parameter]) -> float:
    """Most MiB of a bucket; small enough to overlap, few enough to be cheap."""
    part_mb = sum(each.nbytes for each in trained) / MIB / BUCKETS_AIMED_AT
    return min(MOST_CAP_MB, max(LEAST_CAP_MB, part_mb))
