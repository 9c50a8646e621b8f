"""An accelerator made of threads, for machines that have none.

`register()` makes the device `tdev` known to torch, with streams, events, pinned memory
and an allocator of its own. With `TEST_DEVICE=cuda`, or another type that torch knows,
tests run on that device; tests of what only the test device has are skipped by name.

A process with `AUTOLOAD` in its PYTHONPATH has it once it
has imported torch, as with any device outside torch's sources. The environment
configures it:

| variable | example | meaning |
|---|---|---|
| `TEST_DEVICE_COUNT` | `2` | devices per process, up to 8 |
| `TEST_DEVICE_KERNEL_US` | `0:100,1:400` | time of a kernel per device (µs) |
| `TEST_DEVICE_ELEMENT_NS` | `0:1,1:4` | and of each element in it (ns) |
| `TEST_DEVICE_COLLECTIVES` | `2` | collectives that a device runs at a time, else one |
| `TEST_DEVICE_ENDS_LATE` | `0` | a late collective aborts its group, not the process |
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    import pytest

NAME = "tdev"
KIND = os.environ.get("TEST_DEVICE", NAME)
"""Type of the device that the tests run on."""
BACKEND = "tdccl"
"""The process group of the device, with NCCL's contract."""
AUTOLOAD = str(Path(__file__).parent / "autoload")
"""Folder that names `register` as an entry point of torch."""
DELAYS = {
    "none": (0, 0),
    "copies late": (0, 1),
    "compute late": (1, 0),
    "random": (1, 1),
}
"""Whether kernels of default streams and of all others are delayed, by pattern."""

RANKS = {
    "sync": "tdev:0,tdev:1",
    "cadence": "tdev:0,cpu",
    "async": "tdev:0,tdev:1",
    "auto": "tdev:0,cpu",
}
"""Devices of two ranks by policy: summed by `BACKEND`, or through gloo."""

_extension: Any = None


def register() -> torch.device:
    """First device of the tests; the test device is built if needed and configured.

    Raises:
        RuntimeError: this machine has no device of the type.
    """
    global _extension
    if KIND != NAME:
        found = torch.accelerator.current_accelerator(check_available=True)
        if KIND != "cpu" and (found and found.type) != KIND:
            raise RuntimeError(
                f"expected a device of type {KIND!r}, as TEST_DEVICE says; torch can "
                f"use {found or 'no accelerator'} here"
            )
    elif _extension is None:
        from tests.device import build, device_module

        torch.utils.rename_privateuse1_backend(NAME)
        _extension = build.load_extension()
        torch._register_device_module(NAME, device_module.make(_extension))
        torch.utils.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend(
            BACKEND, _extension.make_process_group, devices=[NAME]
        )
        atexit.register(_extension.stop)
        configure(os.environ)
    return torch.device(KIND, 0)


def device_name(index: int) -> str:
    """Name of the tests' device of this index; skips a test if there is none."""
    if KIND != "cpu" and index >= max(1, torch.accelerator.device_count()):
        import pytest

        pytest.skip(f"there is no device {KIND}:{index}")
    return KIND if KIND == "cpu" else f"{KIND}:{index}"


def has_streams() -> None:
    """Skips a test where copies cannot run beside a device's computation."""
    from elche.devices import streams  # imports torch, which imports this

    if not streams.has_streams(register()):
        import pytest

        pytest.skip(f"{KIND} has no streams")


def extension() -> Any:
    """The C++ module of the registered device; skips a test on any other device."""
    if KIND != NAME:
        import pytest

        asked = sys._getframe(1).f_code.co_name
        pytest.skip(f"only the test device has it: {asked}")
    assert _extension is not None, "call tests.device.register() first"
    return _extension


def configure(variables: Mapping[str, str]) -> None:
    """Applies the variables of the table above; others are left alone."""
    if count := variables.get("TEST_DEVICE_COUNT"):
        extension().set_device_count(int(count))
    kernel_us = _per_device(variables.get("TEST_DEVICE_KERNEL_US", ""))
    element_ns = _per_device(variables.get("TEST_DEVICE_ELEMENT_NS", ""))
    for device in kernel_us.keys() | element_ns.keys():
        set_speed(device, kernel_us.get(device, 0.0), element_ns.get(device, 0.0))


def set_speed(device: int, kernel_us: float, element_ns: float = 0.0) -> None:
    """Sets the time of a kernel (µs) and of each element in it (ns)."""
    extension().set_speed(device, kernel_us, element_ns)


def set_memory_bytes(device: int, limit_bytes: int) -> None:
    """Sets the memory of a device; what is allocated stays."""
    extension().set_memory_bytes(device, limit_bytes)


def set_delays(pattern: str, longest_us: int = 0, seed: int = 0) -> None:
    """Delays kernels: all alike, or with a seed each by a draw up to the longest."""
    if pattern == "random" and seed == 0:
        raise ValueError("random delays need a seed that is not 0")
    main, side = DELAYS[pattern]
    extension().set_delays(main * longest_us, side * longest_us, seed)


@contextmanager
def delays(pattern: str, longest_us: int = 0, seed: int = 0) -> Iterator[None]:
    """Delays kernels of the block and waits for them at its end."""
    set_delays(pattern, longest_us, seed)
    try:
        yield
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
    finally:
        set_delays("none")


@contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Holds a stream (the current one) for the block: later tasks of it wait."""
    hold = extension().hold
    stream = stream or torch.accelerator.current_stream()
    release = hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        release()


def kernel_count() -> int:
    """Kernels that streams of this process have started."""
    return int(extension().kernel_count())


def host_operator_counts() -> dict[str, int]:
    """Calls, by operator, that made the host wait for the device."""
    return dict(extension().host_operator_counts())


def launched(policy: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of `elche run` for two ranks on devices of unequal speed."""
    monkeypatch.setenv("PYTHONPATH", autoloaded())
    monkeypatch.setenv("TEST_DEVICE_KERNEL_US", "1:50")
    return ("--devices", RANKS[policy])


def autoloaded() -> str:
    """PYTHONPATH of processes that have the device once they have imported torch.

    Builds the device; a test that asks for it is skipped without a compiler.
    """
    import pytest  # not in ranks, which import this module too

    from tests.device import build

    if compiler := build.missing_compiler():
        pytest.skip(f"{compiler}, which builds the test device, is not installed")
    build.built()
    return os.pathsep.join([AUTOLOAD, os.environ["PYTHONPATH"]])


def _per_device(text: str) -> dict[int, float]:
    """Numbers by device index from text like `0:100,1:400`."""
    pairs = (each.split(":") for each in text.split(",") if each)
    return {int(device): float(number) for device, number in pairs}
