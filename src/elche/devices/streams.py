"""Streams and events of any accelerator, and the host memory that they copy from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from elche.devices.choice import NVIDIA
from elche.errors import ConfigError


def has_streams(device: torch.device) -> bool:
    """True if copies can run beside a device's computation.

    This needs several streams (mps has one) and pinned memory on the host.
    """
    try:
        return device.type != "cpu" and _has_streams(device)
    except RuntimeError:  # tried again, since pinned memory may only be short now
        return False


@cache
def _has_streams(device: torch.device) -> bool:
    torch.empty(1, device="cpu", pin_memory=True)
    return torch.Stream(device) != torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which this thread's work for a device is enqueued."""
    return torch.accelerator.current_stream(device)


def record_event(device: torch.device) -> torch.Event:
    """Records an event after all work that this thread has enqueued for a device."""
    event = torch.Event(device)
    event.record(current_stream(device))
    return event


def beside(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context whose work and allocations use a stream; None: the current one.

    Several threads may enter it for one stream. A `torch.Stream` as context allows only
    one: it stores the state to restore, and older torch versions refuse a second entry.
    """
    if stream is None:
        return nullcontext()
    fields = ("stream_id", "device_index", "device_type")
    return torch.Stream(**{each: getattr(stream, each) for each in fields})


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
            "a CUDA graph does not replay the backward hooks that reduce gradients, so "
            "it must not contain a whole training step; capture the model with "
            "torch.cuda.make_graphed_callables, or average parameters (policy 'async' "
            "or 'cadence'), which needs no hooks"
        )
