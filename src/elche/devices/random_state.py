"""Random numbers of the devices, saved, restored and forked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from elche.devices import choice


def state_of(device: torch.device) -> torch.Tensor:
    """State of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = choice.module_of(device.type).get_rng_state(device)
    return state


def restore(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        choice.module_of(device.type).set_rng_state(state, device)


def saved_state() -> dict[str, Any]:
    """Type and state of the current accelerator, for a file; None if it is unused."""
    is_used = choice.is_started()
    state = state_of(choice.current_device()) if is_used else None
    return {"type": choice.kind(), "state": state}


def restore_saved(saved: Mapping[str, Any]) -> None:
    """Restores :func:`saved_state`, unless the accelerator is of another type."""
    is_same = saved["type"] == choice.kind() and choice.is_started()
    if is_same and saved["state"] is not None:
        restore(choice.current_device(), saved["state"])


def forked(
    devices: Collection[torch.device], *, enabled: bool = True
) -> AbstractContextManager[None]:
    """Context after which generators of the CPU and of these devices are restored."""
    near = [device for device in devices if device.type != "cpu"]
    return torch.random.fork_rng(
        near, enabled=enabled, device_type=near[0].type if near else choice.NVIDIA
    )


def seed(devices: Collection[torch.device], number: int) -> None:
    """Seeds the CPU's generator and those of these devices.

    Has the effect of `torch.manual_seed`, which seeds all devices and takes 0.1 ms.
    """
    torch.default_generator.manual_seed(number)
    for device in devices:
        if device.type == "cpu":
            continue
        module = choice.module_of(device.type)
        generators = getattr(module, "default_generators", None)
        if generators:
            generators[device.index].manual_seed(number)
        else:
            module.manual_seed(number)  # of the current device
