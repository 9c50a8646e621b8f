"""Arguments of `elche.DistributedDataParallel`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import size_bytes
from elche.comm.gradients.buckets.bucket_contract import Strategy
from elche.ddp.weighted_reducer import LossReduction
from elche.errors import ConfigError
from elche.torch_internals.batches import to_device

MIB = 2**20
LEAST_CAP_MB, MOST_CAP_MB = 2.0, 25.0
BUCKETS_AIMED_AT = 16
ONLY_FASTER = ("batched_grad_copy", "skip_all_reduce_unused_params")
"""Arguments of torch's that change how quickly it comes to the same."""
_IN_ORDER = "leave it out: buckets go in the order in which gradients appear"
INSTEAD = {
    "codec": "codec= was removed here: gradients travel in fewer bytes under "
    "elche.setup(policy='sync', codec=...)",
    "bucket_cap_mb_list": "give one bucket_cap_mb for all",
    "delay_all_reduce_named_params": _IN_ORDER,
    "device_mesh": "give process_group=mesh.get_group()",
    "mixed_precision": "run the model under torch.autocast",
    "param_to_hook_all_reduce": _IN_ORDER,
}
"""What to do in place of an argument that this wrapper has not."""


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """What all ranks must set alike; see `elche.DistributedDataParallel`.

    Raises:
        ConfigError: a value is not one of those allowed.
    """

    broadcast_buffers: bool
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    static_graph: bool
    loss_reduction: LossReduction
    weight_by: Literal["samples", "ranks"]
    strategy: Strategy | Literal["none"]
    transport: Literal["auto", "gloo"]

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


def refuse_unsupported(options: dict[str, Any]) -> None:
    """Refuses arguments that only torch's wrapper has, unless they ask for nothing.

    Raises:
        ConfigError: names them, or what neither wrapper has.
    """
    for name, value in options.items():
        asks_nothing = value is None or value is False
        if name in ONLY_FASTER or (name in INSTEAD and asks_nothing):
            continue
        raise ConfigError(
            f"elche.DistributedDataParallel has no argument {name}; "
            + INSTEAD.get(name, "torch's has none of this name either")
        )


def input_device(
    module: nn.Module, device_ids: list[Any] | None, output_device: Any
) -> list[torch.device] | None:
    """Where inputs are moved; None: they stay where they are.

    Raises:
        ConfigError: the module is not on one CUDA device, or on several kinds.
    """
    devices = {parameter.device for parameter in module.parameters()}
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError("device_ids can only be None or contain a single element")
    if len({device.type for device in devices}) > 1:
        raise ConfigError(
            "expected all parameters on one type of device, found them on "
            + ", ".join(sorted(map(str, devices)))
        )
    if not device_ids and not output_device:  # as torch reads them
        return None
    if len(devices) != 1 or next(iter(devices)).type == "cpu":
        raise ConfigError(
            "device_ids and output_device are for a module on one CUDA device, not on "
            + ", ".join(sorted(map(str, devices)))
        )
    if not device_ids:
        return None
    first = device_ids[0]
    return [torch.device("cuda", first) if isinstance(first, int) else first]


def moved(inputs: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """Inputs on a device."""
    positional, named = to_device(inputs, kwargs, device, True)
    return positional[0], named[0]


def cap_bytes(
    bucket_cap_mb: float | None, trained: list[tuple[str, nn.Parameter]]
) -> int:
    """Most bytes of a bucket; small enough to overlap, few enough to be cheap."""
    if bucket_cap_mb is not None:
        return max(1, int(bucket_cap_mb * MIB))
    total = sum(size_bytes(parameter) for _, parameter in trained)
    part_mb = total / MIB / BUCKETS_AIMED_AT
    return int(min(MOST_CAP_MB, max(LEAST_CAP_MB, part_mb)) * MIB)
