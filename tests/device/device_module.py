"""`torch.tdev`: the functions that torch looks for in a device's module."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def make(extension: Any) -> types.ModuleType:
    """The module of the device that `extension` implements."""
    module = types.ModuleType("torch.tdev", __doc__)

    def index(device: torch.device | str | int | None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return int(extension.current_device()) if found is None else found

    def get_rng_state(device: torch.device | str | int = "tdev") -> torch.Tensor:
        return extension.default_generator(index(device)).get_state()

    def set_rng_state(
        new_state: torch.Tensor, device: torch.device | str | int = "tdev"
    ) -> None:
        extension.default_generator(index(device)).set_state(new_state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [get_rng_state(each) for each in range(extension.device_count())]

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for each, state in enumerate(new_states):
            set_rng_state(state, each)

    def manual_seed(seed: int) -> None:
        extension.default_generator(-1).manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for each in range(extension.device_count()):
            extension.default_generator(each).manual_seed(seed)

    @contextmanager
    def device(device: torch.device | str | int | None) -> Iterator[None]:
        previous = extension.set_device(index(device))
        try:
            yield
        finally:
            extension.set_device(previous)

    def synchronize(device: torch.device | str | int | None = None) -> None:
        torch.accelerator.synchronize(index(device))

    def set_device(device: torch.device | str | int) -> None:
        extension.set_device(index(device))

    def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(index(device))

    members = {
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "_is_in_bad_fork": extension.is_in_bad_fork,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    functions = [
        device,
        get_rng_state,
        set_rng_state,
        get_rng_state_all,
        set_rng_state_all,
        manual_seed,
        manual_seed_all,
        synchronize,
        set_device,
        current_stream,
    ]
    members.update({each.__name__: each for each in functions})
    for name, member in members.items():
        setattr(module, name, member)
    return module
