"""`torch.tdev`: the functions that torch looks for in a device's module."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Device = torch.device | str | int | None
"""A device as callers name it; the current one without an index."""


def make(extension: Any) -> types.ModuleType:
    """The module of the device that `extension` implements."""

    def index(device: Device) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return int(extension.current_device()) if found is None else found

    def generator(device: Device) -> torch.Generator:
        found: torch.Generator = extension.default_generator(index(device))
        return found

    @contextmanager
    def device(device: Device) -> Iterator[None]:
        previous = extension.set_device(index(device))
        try:
            yield
        finally:
            extension.set_device(previous)

    def manual_seed_all(seed: int) -> None:
        for each in range(extension.device_count()):
            generator(each).manual_seed(seed)

    members = {
        "_initialized": True,
        "_is_in_bad_fork": extension.is_in_bad_fork,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device": device,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(
            index(device)
        ),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "manual_seed": lambda seed: generator(None).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module = types.ModuleType("torch.tdev", __doc__)
    vars(module).update(members)
    return module
