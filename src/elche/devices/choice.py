"""Choice of devices: which accelerators torch can use here, by name and number.

A process has one type of accelerator (`torch.accelerator`). A type that torch does not
have by itself is registered by the extension that the user imports.
"""

from __future__ import annotations

from typing import Any

import torch

from elche.errors import ConfigError

CPU = torch.device("cpu")
NVIDIA = "cuda"
"""Type of NVIDIA's devices in torch, and of AMD's."""
UNTRIED = " (untested)"
"""Suffix for the names of devices on which elche has never run."""


def kind() -> str:
    """Type of this process's accelerators, such as ``xpu``; "" without any.

    The process may still fork after this call, and after :func:`count`.
    """
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def vendor_kind() -> str:
    """Type of the usable accelerators, ``rocm`` for AMD's; "" if torch can use none."""
    if not usable_count():
        return ""
    return "rocm" if kind() == NVIDIA and torch.version.hip else kind()


def count() -> int:
    """Number of accelerators in the machine, even if no driver supports them."""
    return torch.accelerator.device_count() if kind() else 0


def usable_count() -> int:
    """Number of accelerators that torch can use: 0 with a driver that is too old.

    Forks of this process made after the call may not use CUDA.
    """
    return count() if torch.accelerator.is_available() else 0


def device_names() -> list[str]:
    """Names of the accelerators that torch can use here, such as ``cuda:0``."""
    return _names(usable_count())


def _names(number: int) -> list[str]:
    return [f"{kind()}:{index}" for index in range(number)]


def default_device(local_rank: int) -> torch.device:
    """Device of a rank that names none: accelerators in turn, or the CPU."""
    names = device_names()
    return torch.device(names[local_rank % len(names)]) if names else CPU


def is_known(name: str) -> bool:
    """True if torch, or an extension loaded in this process, has this type of device.

    Torch reserves names, such as ``hpu``, for types that only extensions add.
    """
    try:
        return module_of(torch.device(name).type) is not None
    except RuntimeError:
        return False


def check_device(name: str) -> torch.device:
    """Returns the named device, which must exist on this machine.

    Raises:
        ConfigError: the name is malformed or the device is not there.
    """
    if not is_known(name):
        raise ConfigError(
            f"unknown device {name!r}; expected names like cpu, cuda:0, mps; import "
            "the extension that adds a type of device before elche.setup"
        )
    device = torch.device(name)
    if device.type == "cpu":
        return CPU
    known = _names(count())
    device = torch.device(device.type, device.index or 0)
    if str(device) not in known:
        raise ConfigError(
            f"device {name!r} does not exist: torch can use "
            f"{', '.join(known) or 'no accelerator'} here; choose among them, or cpu"
        )
    return device


def use(device: torch.device) -> None:
    """Makes a device the current one of its type in this thread."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current_device() -> torch.device:
    """This thread's current accelerator; the CPU if there is none."""
    if not count():
        return CPU
    return torch.device(kind(), torch.accelerator.current_device_index())


def is_started() -> bool:
    """True if this process has used its accelerator, or may have."""
    is_initialized = getattr(module_of(kind()), "is_initialized", None)
    return count() > 0 and (is_initialized is None or bool(is_initialized()))


def start() -> None:
    """Initializes the accelerator, as its first use does.

    Raises:
        RuntimeError: this process is a fork of one that has used the accelerator.
    """
    init = getattr(module_of(kind()), "init", None)
    if count() and init is not None:
        init()


def product_name(device: torch.device) -> str:
    """Product name of a device, for people and for comparison between ranks."""
    find = getattr(module_of(device.type), "get_device_name", None)
    if device.type == NVIDIA and find is not None:
        return str(find(device))
    if device.type == "cpu":
        return "CPU"
    name = "" if find is None else f" {find(device)}"
    return f"{device.type.upper()}{name}{UNTRIED}"


def module_of(kind: str) -> Any:
    """Torch's module for a type of device (`torch.xpu`); None without one."""
    return getattr(torch, kind, None) if kind else None
