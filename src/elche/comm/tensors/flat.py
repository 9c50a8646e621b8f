"""Tensors as flat host memory, processed in segments that fit a core's cache.

Averaging is bound by passes over memory: a model is larger than a core's cache, and
operations on small tensors are dominated by launch overhead. :class:`FlatLayout`
therefore concatenates tensors and cuts them into segments of about a megabyte; all
operations on a segment run before the next segment. Segment boundaries depend only on
shapes and memory formats, so rounding is the same on all ranks.

Tensors of one accelerator pass through a flat tensor there and pinned host memory, in a
few large copies. All arithmetic runs on the host, so ranks on any
device get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elche.devices import choice, streams
from elche.torch_internals.held import foreach_add_, foreach_copy_, foreach_norm

SEGMENT_ELEMENTS = 262_144


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive whole tensors, or a part of one large tensor.

    Attributes:
        start: index of the first element in flat memory.
        stop: index after the last element.
        first: index of the first tensor.
        last: index after the last tensor.
        offset: start within the tensor that the segment is part of; None if whole.
    """

    start: int
    stop: int
    first: int
    last: int
    offset: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatImage:
    """Flat memory of a layout.

    Attributes:
        flat: the whole memory.
        parts: flat memory of each segment.
        views: per segment, a view per tensor, shaped like it.
    """

    flat: torch.Tensor
    parts: list[torch.Tensor]
    views: list[list[torch.Tensor]]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums: float32 for half precision, else unchanged."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cut(tensors: Sequence[torch.Tensor], limit: int) -> list[Segment]:
    """Cuts tensors into segments of at most ``limit`` elements, or of one tensor.

    A larger tensor is cut itself if it is contiguous.
    """
    segments: list[Segment] = []
    at = first = start = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel()
        if at > start and at + size - start > limit:
            segments.append(Segment(start, at, first, index))
            first, start = index, at
        if size > limit and tensor.is_contiguous():
            for offset in range(0, size, limit):
                stop = at + min(size, offset + limit)
                segments.append(Segment(at + offset, stop, index, index + 1, offset))
            first, start = index + 1, at + size
        at += size
    if at > start:
        segments.append(Segment(start, at, first, len(tensors)))
    return segments


class FlatLayout:
    """Offsets of tensors in flat memory.

    Args:
        tensors: tensors to lay out; assign ``tensors`` to replace them later by others
            of the same shapes.
        dtype: dtype of the flat memory.
        limit: maximum number of elements per segment.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        limit: int = SEGMENT_ELEMENTS,
    ) -> None:
        self.tensors = list(tensors)
        self.dtype = dtype
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        self.segments = cut(self.tensors, limit)
        self._key = _key(self.tensors)
        self._stage = DeviceStage.for_tensors(self.tensors, dtype)

    @property
    def is_staged(self) -> bool:
        """True if the tensors are copied as a whole from and to a device."""
        return self._stage is not None

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if shapes, dtypes, devices and contiguity match the layout's tensors."""
        return self._key == _key(tensors)

    def changed(self) -> torch.Tensor | None:
        """Returns the first tensor that no longer fits the layout, or None."""
        found = zip(self._key, _key(self.tensors), self.tensors, strict=True)
        return next((tensor for old, new, tensor in found if old != new), None)

    def over(self, flat: torch.Tensor) -> FlatImage:
        """Returns an image over existing memory of ``numel`` elements."""
        parts = [flat[segment.start : segment.stop] for segment in self.segments]
        return FlatImage(flat, parts, self._shaped(parts))

    def image(self) -> FlatImage:
        """Allocates memory for all segments; pinned if the tensors are staged."""
        if self._stage is not None:
            return self.over(self._stage.host_memory())
        return self.over(torch.empty(self.numel, dtype=self.dtype, device="cpu"))

    def scratch(self) -> FlatImage:
        """Allocates memory of the longest segment, which all segments share in turn."""
        longest = max((segment.numel for segment in self.segments), default=0)
        flat = torch.empty(longest, dtype=self.dtype, device="cpu")
        parts = [flat[: segment.numel] for segment in self.segments]
        return FlatImage(flat, parts, self._shaped(parts))

    def fetch(self, image: FlatImage) -> None:
        """Copies staged tensors into an image; waits for the device."""
        if self._stage is not None:
            self._stage.fetch(self.tensors, image.flat)

    def read(self, index: int, image: FlatImage) -> None:
        """Copies a segment's tensors into an image, unless they are staged."""
        if self._stage is None:
            foreach_copy_(image.views[index], self._members(index))

    def subtract(self, index: int, base: FlatImage, image: FlatImage) -> None:
        """Writes ``base`` minus the tensors to an image, which holds staged tensors."""
        members = self._members(index)
        part = image.parts[index]
        if self._stage is None and len(members) == 1 and members[0].is_contiguous():
            flat = members[0].detach().view(-1)
            if flat.device == part.device:
                torch.sub(base.parts[index], flat, out=part)
                return
        self.read(index, image)
        torch.sub(base.parts[index], part, out=part)

    def write(self, index: int, image: FlatImage) -> None:
        """Copies a segment into its tensors; if staged, :meth:`flush` does it."""
        if self._stage is None:
            foreach_copy_(self._members(index), image.views[index])

    def add(self, index: int, image: FlatImage) -> None:
        """Adds a segment to its tensors; if staged, :meth:`flush_sum` does it."""
        if self._stage is not None:
            return
        members = self._members(index)
        if all(tensor.device.type == "cpu" for tensor in members):
            foreach_add_(members, image.views[index])
            return
        for tensor, view in zip(members, image.views[index], strict=True):
            tensor.add_(view.to(tensor.device))

    def flush(self, image: FlatImage) -> None:
        """Copies a flat copy of all tensors back into the staged ones."""
        if self._stage is not None:
            foreach_copy_(self.tensors, self._stage.put(image.flat))

    def flush_sum(self, image: FlatImage) -> None:
        """Adds a flat tensor of all values to the staged tensors."""
        if self._stage is not None:
            foreach_add_(self.tensors, self._stage.put(image.flat))

    def _members(self, index: int) -> list[torch.Tensor]:
        segment = self.segments[index]
        if segment.offset is None:
            return self.tensors[segment.first : segment.last]
        whole = self.tensors[segment.first].detach().view(-1)
        return [whole[segment.offset : segment.offset + segment.numel]]

    def _shaped(self, parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [
            [part]
            if segment.offset is not None
            else shaped(part, self.tensors[segment.first : segment.last])
            for segment, part in zip(self.segments, parts, strict=True)
        ]


class DeviceStage:
    """A flat device tensor that stages copies between tensors and pinned host memory.

    All copies run in order on the caller's stream.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._views = shaped(self._flat, tensors)

    @staticmethod
    def for_tensors(
        tensors: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> DeviceStage | None:
        """Makes a stage; None if the tensors are not all on one device with streams."""
        devices = {tensor.device for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else choice.CPU
        has_streams = streams.has_streams(device)
        return DeviceStage(tensors, dtype, device) if has_streams else None

    def host_memory(self) -> torch.Tensor:
        """Allocates pinned memory of the same size."""
        flat = self._flat
        return streams.host_memory(flat.shape, flat.dtype, flat.device)

    def fetch(self, tensors: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        """Copies the tensors' current values into pinned memory; waits for them."""
        foreach_copy_(self._views, list(tensors))
        host.copy_(self._flat)

    def put(self, host: torch.Tensor) -> list[torch.Tensor]:
        """Starts copying pinned memory to the device; returns a view per tensor there.

        The memory may be changed after the next :meth:`fetch`, not before.
        """
        self._flat.copy_(host, non_blocking=True)
        return self._views


def shaped(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Splits ``flat`` into consecutive views shaped like the given tensors."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have equal values; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


@torch.no_grad()
def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """True if every element is finite (one pass, one synchronization per device)."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(
        bool(torch.stack([n.float() for n in foreach_norm(some)]).isfinite().all())
        for some in by_device.values()
    )


def _key(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
