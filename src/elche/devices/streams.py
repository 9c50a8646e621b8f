"""Streams and events of any accelerator, and the host memory that they copy from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from elche.devices.choice import NVIDIA
from elche.errors import ConfigError

Stream = torch.Stream
Event = torch.Event


@cache
def has_streams(device: torch.device) -> bool:
    """True if copies can run beside a device's computation.

    This needs several streams (mps has one) and pinned memory on the host.
    """
    if device.type == "cpu":
        return False
    try:
        beside = Stream(device)
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return beside != current_stream(device)


@cache
def has_events(device: torch.device) -> bool:
    """True if a device's progress can be asked for; the CPU has none to ask for."""
    if device.type == "cpu":
        return False
    try:
        record_event(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def current_stream(device: torch.device) -> Stream:
    """The stream on which this thread's work for a device is enqueued."""
    return torch.accelerator.current_stream(device)


def record_event(device: torch.device) -> Event:
    """An event behind all work that this thread has enqueued for a device."""
    event = Event(device)
    event.record(current_stream(device))
    return event


@contextmanager
def beside(stream: Stream | None) -> Iterator[None]:
    """Context whose work and allocations use a stream; None: the current one."""
    if stream is None:
        yield
        return
    index = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def host_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocates host memory for copies with a device; pinned if that has streams."""
    pins = has_streams(device)
    return torch.empty(shape, dtype=dtype, pin_memory=pins, device="cpu")


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def refuse_capture() -> None:
    """Refuses to reduce gradients inside the capture of a CUDA graph.

    Raises:
        ConfigError: the current stream is being captured.
    """
    cuda = getattr(torch, NVIDIA)
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        raise ConfigError(
            "gradients are reduced by hooks in the backward pass, which a CUDA graph "
            "does not replay: a graph must not hold a whole training step here; "
            "capture the model with torch.cuda.make_graphed_callables, or average "
            "parameters (policy 'async', or 'cadence'), which needs no hook"
        )
