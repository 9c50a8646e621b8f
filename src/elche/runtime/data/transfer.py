"""Transfer of batches to the device."""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from elche.devices import streams

logger = logging.getLogger(__name__)


def to_device(data: Any, device: torch.device) -> Any:
    """Moves every tensor in a batch, whatever containers it has.

    Containers that are not tuples, lists, mappings or objects with ``.to`` are returned
    unchanged.
    """
    aside = streams.has_streams(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=aside and tensor.device.type == "cpu")

    return map_batch(data, move, lambda item: item.to(device))


def map_batch(
    data: Any,
    on_tensor: Callable[[torch.Tensor], Any],
    on_object: Callable[[Any], Any],
) -> Any:
    """Applies functions to the tensors of a batch, and to its objects with ``.to``."""
    if isinstance(data, torch.Tensor):
        return on_tensor(data)
    if _has_to(data):
        return on_object(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_batch(item, on_tensor, on_object) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_batch(item, on_tensor, on_object) for item in data)
    if isinstance(data, Mapping):
        mapped = {
            key: map_batch(value, on_tensor, on_object) for key, value in data.items()
        }
        if type(data) is dict or not hasattr(data, "update"):
            return mapped
        same = copy.copy(data)
        same.update(mapped)
        return same
    return data


def tensors_in(data: Any) -> list[torch.Tensor] | None:
    """Every tensor that :func:`to_device` moves; None if some are hidden.

    Hidden are tensors of an object that only its own ``.to`` can move, and tensors
    whose memory is in several pieces (sparse and nested ones). Packed sequences and
    dictionaries of :class:`collections.UserDict`'s kind are looked into.
    """
    found: list[torch.Tensor] = []
    return found if _collect(data, found) else None


@dataclass(frozen=True, slots=True)
class Copy:
    """A batch on its way to the device.

    Attributes:
        data: batch on the device; usable only after ``fence``.
        source: batch on the host; kept until ``fence`` has passed.
        fence: event at the end of this copy.
    """

    data: Any
    source: Any
    fence: torch.Event


class CopyStream:
    """A stream of its own for copies to one device.

    A copied tensor's memory belongs to this stream's pool. Without :meth:`keep` it
    would go to the next copy as soon as Python drops the batch, while kernels that
    read it are still queued.

    Args:
        device: a device with streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._can_pin = True

    def copy(self, data: Any, pin: bool) -> Copy:
        """Begins to copy a batch, staged in pinned memory if ``pin``.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        source = self._pinned(data) if pin else data
        with streams.beside(self._stream):
            moved = to_device(source, self._device)
            fence = streams.record_event(self._device)
        return Copy(moved, source, fence)

    def wait(self, fence: torch.Event) -> None:
        """Makes the stream that trains wait for a copy; the host does not."""
        streams.current_stream(self._device).wait_event(fence)

    def keep(self, tensor: torch.Tensor) -> None:
        """Ties a copied tensor's memory to the current stream's work."""
        tensor.record_stream(streams.current_stream(self._device))

    def _pinned(self, data: Any) -> Any:
        """The batch in pinned memory; unchanged if pinning fails."""
        if not self._can_pin:
            return data
        try:
            return map_batch(data, _pin_tensor, lambda item: item)
        except RuntimeError as error:
            self._can_pin = False
            logger.warning("batches are copied from pageable memory: %s", error)
            return data


def _pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain else tensor


def _has_to(data: Any) -> bool:
    return callable(getattr(data, "to", None))


def _collect(data: Any, found: list[torch.Tensor]) -> bool:
    """Appends the tensors of a batch; False if others are hidden."""
    if isinstance(data, torch.Tensor):
        found.append(data)
        return data.layout == torch.strided and not data.is_nested
    if _has_to(data) and not isinstance(data, (PackedSequence, UserDict)):
        return False
    items: Iterable[Any] = ()
    if isinstance(data, Mapping):
        items = data.values()
    elif isinstance(data, (list, tuple)):
        items = data
    return all(_collect(item, found) for item in items)
