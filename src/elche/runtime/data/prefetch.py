"""Batches on the device before the loop asks for them.

The user's DataLoader loads in the background as far as it has workers. From there the
training thread takes batches where the loop asks for the next one, begins their copies
on a stream beside the training, and hands out one whose copy it began a batch or two
ago.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from elche.cadence.prefetch_gauge import (
    MAX_DEPTH,
    ActivationPeak,
    PinTrial,
    decide_prefetch,
)
from elche.runtime.data.transfer import (
    Copy,
    CopyStream,
    CudaCopyStream,
    Fence,
    tensors_in,
    to_device,
)

WARM_BATCHES = 3
"""After so many loop bodies a step has shown its peak; the first builds state."""
GAUGE_EVERY_BATCHES = 32

Tag = TypeVar("Tag")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """A device's memory, in bytes.

    Attributes:
        total_bytes: all there is.
        free_bytes: what this process could allocate, cached memory included.
        active_bytes: what its tensors take, with memory that queued kernels still use.
        peak_bytes: the most that they took at once; 0 with 0 active if nobody counts.
    """

    total_bytes: int
    free_bytes: int
    active_bytes: int
    peak_bytes: int


class MemoryProbe(Protocol):
    """Reads a device's memory."""

    def read(self) -> MemoryReading:
        """The figures now."""


class CudaMemoryProbe:
    """The driver's and the caching allocator's figures of a CUDA device.

    The driver counts memory that the allocator caches as used; here it is free. Peaks
    are read and never reset, as they are the user's too.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._counts = torch.cuda.get_allocator_backend() == "native"

    def read(self) -> MemoryReading:
        """The figures now; does not wait for the device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        active_bytes = peak_bytes = 0
        if self._counts:
            stats = torch.cuda.memory_stats(self._device)
            active_bytes = stats.get("active_bytes.all.current", 0)
            peak_bytes = stats.get("active_bytes.all.peak", 0)
            reserved_bytes = stats.get("reserved_bytes.all.current", 0)
            fraction = torch.cuda.get_per_process_memory_fraction(self._device)
            allowed_bytes = max(0, int(fraction * total_bytes) - reserved_bytes)
            cached_bytes = max(0, reserved_bytes - active_bytes)
            free_bytes = min(free_bytes, allowed_bytes) + cached_bytes
        return MemoryReading(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            active_bytes=active_bytes,
            peak_bytes=peak_bytes,
        )


def most_ahead(device: torch.device) -> int:
    """Batches that :meth:`DevicePrefetcher.on` may take beyond the one handed out."""
    return MAX_DEPTH if device.type == "cuda" else 0


@dataclass(slots=True)
class _Held(Generic[Tag]):
    """A batch taken from the loader: on its way to the device, or not moved yet."""

    tag: Tag
    data: Any
    copy: Copy | None = None
    copied_bytes: int = 0


class DevicePrefetcher(Generic[Tag]):
    """Hands out batches on the device, and has the next ones copied meanwhile.

    On the CPU it passes batches through; on other devices without a copy stream it
    moves each when it is handed out. Whatever cannot be copied ahead (objects that only
    their own ``.to`` can move, batches for which there is no memory) is moved then too.

    Args:
        next_batch: gives the next loaded batch with its tag, None where there is none
            yet. It may call :meth:`discard`.
        device: where batches go.
        copies: the stream of copies, None to move nothing ahead.
        probe: reads the device's memory, None to move nothing ahead.
        max_depth: most batches held ahead.

    Attributes:
        depth: batches held ahead at present.
        data_wait_s: seconds that the last :meth:`take` spent in ``next_batch``.
        transfer_s: seconds that it spent on starting copies (not their duration).
    """

    def __init__(
        self,
        next_batch: Callable[[], tuple[Tag, Any] | None],
        device: torch.device,
        copies: CopyStream | None = None,
        probe: MemoryProbe | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        self._next_batch = next_batch
        self._device = device
        self._copies = copies
        self._probe = probe
        self._max_depth = max_depth
        self._held: deque[_Held[Tag]] = deque()
        self._being_read: deque[tuple[Fence, Any]] = deque()
        self._peak = ActivationPeak()
        self._pin_trial = PinTrial()
        self._most_depth = max_depth
        self._batch_bytes = 0
        self._ahead_pays = False
        self._batches = 0
        self._gauge_at = 1
        self.depth = 0
        self.data_wait_s = 0.0
        self.transfer_s = 0.0

    @staticmethod
    def on(
        next_batch: Callable[[], tuple[Tag, Any] | None],
        device: torch.device,
    ) -> DevicePrefetcher[Tag]:
        """A prefetcher with what the device has: copies ahead on CUDA, else none."""
        if device.type != "cuda":
            return DevicePrefetcher(next_batch, device)
        return DevicePrefetcher(
            next_batch,
            device,
            CudaCopyStream(device),
            CudaMemoryProbe(device),
        )

    @property
    def has_batch(self) -> bool:
        """True if :meth:`take` gives one for sure, unless it is discarded meanwhile."""
        return bool(self._held)

    def take(self) -> tuple[Tag, Any] | None:
        """The next batch, on the device; None if none is held and none has come.

        Does not wait for a copy: the stream that trains does. The first batch after a
        pause is handed out before others are fetched, later ones behind the fetch of
        at most two.

        Raises:
            Whatever ``next_batch`` raises; batches held then stay held.
        """
        self.data_wait_s = self.transfer_s = 0.0
        if self._copies is None or self._probe is None:
            return self._take_through()
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        if self._batches >= self._gauge_at:
            self._gauge(self._probe)
        ahead = self._ahead_pays
        for _ in range(2):
            goal = 1 + self.depth if ahead else 1
            if len(self._held) >= goal or not self._fetch(self._copies):
                break
        if not self._held:
            self._ahead_pays = False
            return None
        return self._hand_out(self._copies, self._held.popleft())

    def discard(self) -> None:
        """Drops what is held: its leases went back, or the epoch ended."""
        for held in self._held:
            if held.copy is not None:
                self._being_read.append((held.copy.fence, held.copy.source))
        self._held.clear()
        self._ahead_pays = False

    def _take_through(self) -> tuple[Tag, Any] | None:
        began_s = time.perf_counter()
        got = self._next_batch()
        taken_s = time.perf_counter()
        self.data_wait_s = taken_s - began_s
        if got is not None and self._device.type != "cpu":
            got = got[0], to_device(got[1], self._device)
        self.transfer_s = time.perf_counter() - taken_s
        return got

    def _fetch(self, copies: CopyStream) -> bool:
        """Takes one batch from the loader and begins its copy; False if none came."""
        began_s = time.perf_counter()
        got = self._next_batch()
        self.data_wait_s += time.perf_counter() - began_s
        if got is None:
            return False
        held = _Held(*got)
        self._held.append(held)
        tensors = tensors_in(held.data) or ()
        copied_bytes = sum(t.nbytes for t in tensors if t.device.type == "cpu")
        self._batch_bytes = max(self._batch_bytes, copied_bytes)
        self._ahead_pays = copied_bytes > 0
        if copied_bytes and self.depth:
            self._begin_copy(copies, held, copied_bytes)
        return True

    def _begin_copy(
        self, copies: CopyStream, held: _Held[Tag], copied_bytes: int
    ) -> None:
        began_s = time.perf_counter()
        pin = self._pin_trial.pin
        try:
            held.copy = copies.copy(held.data, pin)
        except torch.cuda.OutOfMemoryError:
            self._most_depth = self.depth = self.depth // 2
            logger.warning(
                "no device memory left for a batch ahead of its use: %d will be held "
                "ahead from now on",
                self.depth,
            )
            return
        held.data, held.copied_bytes = held.copy.data, copied_bytes
        taken_s = time.perf_counter() - began_s
        self.transfer_s += taken_s
        self._pin_trial.observe(pin, taken_s, copied_bytes)

    def _hand_out(self, copies: CopyStream, held: _Held[Tag]) -> tuple[Tag, Any]:
        self._batches += 1
        if held.copy is None:
            began_s = time.perf_counter()
            moved = to_device(held.data, self._device)
            self.transfer_s += time.perf_counter() - began_s
            return held.tag, moved
        copies.wait(held.copy.fence)
        for tensor in tensors_in(held.data) or ():
            copies.keep(tensor)
        self._being_read.append((held.copy.fence, held.copy.source))
        return held.tag, held.data

    def _gauge(self, probe: MemoryProbe) -> None:
        """Decides the depth anew; between two steps, where the peak is behind."""
        reading = probe.read()
        warm = self._batches >= WARM_BATCHES
        self._gauge_at = self._batches + GAUGE_EVERY_BATCHES if warm else WARM_BATCHES
        if warm:
            self._peak.observe(reading.active_bytes, reading.peak_bytes)
        held_bytes = sum(held.copied_bytes for held in self._held)
        fitting = decide_prefetch(
            total_bytes=reading.total_bytes,
            free_bytes=min(reading.free_bytes, reading.total_bytes - held_bytes),
            held_bytes=held_bytes,
            batch_bytes=self._batch_bytes,
            peak_bytes=self._peak.value_bytes,
            max_depth=self._max_depth,
        )
        self.depth = min(fitting, self._most_depth)
