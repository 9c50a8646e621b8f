"""Batches moved to the device before the loop requests them.

The user's DataLoader loads in the background as far as it has workers. When the loop
asks for the next batch, the training thread takes loaded batches, begins their copies
on a side stream, and yields one whose copy began one or two batches ago.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from elche.cadence.prefetch_gauge import (
    MAX_DEPTH,
    ActivationPeak,
    PinTrial,
    decide_prefetch,
)
from elche.devices import streams
from elche.devices.memory import MemoryReading, read_memory
from elche.runtime.data.transfer import Copy, CopyStream, tensors_in, to_device

WARM_BATCHES = 3
"""Batches before a step's memory peak is trusted; the first allocates state."""
GAUGE_EVERY_BATCHES = 32

Tag = TypeVar("Tag")
logger = logging.getLogger(__name__)


def most_ahead(device: torch.device) -> int:
    """Batches that :meth:`DevicePrefetcher.on` may fetch ahead of the yielded one."""
    return MAX_DEPTH if streams.has_streams(device) else 0


@dataclass(slots=True)
class _Held(Generic[Tag]):
    """A batch taken from the loader: on its way to the device, or not moved yet."""

    tag: Tag
    data: Any
    copy: Copy | None = None
    copied_bytes: int = 0


class DevicePrefetcher(Generic[Tag]):
    """Yields batches on the device while the next ones are copied.

    On the CPU it passes batches through; on other devices without a copy stream it
    moves each when it is yielded. Batches that cannot be copied ahead (objects that
    only their own ``.to`` can move, or too little memory) are moved then too.

    Args:
        next_batch: returns the next loaded batch with its tag; None if there is none
            yet. It may call :meth:`discard`.
        device: device that batches are moved to.
        copies: the stream of copies, None to move nothing ahead.
        read: function that returns the device's memory.

    Attributes:
        depth: batches held ahead at present.
        transfer_s: seconds that the last :meth:`take` spent on starting copies (not
            their duration).
    """

    def __init__(
        self,
        next_batch: Callable[[], tuple[Tag, Any] | None],
        device: torch.device,
        copies: CopyStream | None = None,
        read: Callable[[], MemoryReading] | None = None,
    ) -> None:
        self._next_batch = next_batch
        self._device = device
        self._copies = copies
        self._read = read or partial(read_memory, device)
        self._held: deque[_Held[Tag]] = deque()
        self._being_read: deque[tuple[Any, Any]] = deque()
        self._peak = ActivationPeak()
        self._pin_trial = PinTrial()
        self._most_depth = MAX_DEPTH
        self._batch_bytes = 0
        self._ahead_pays = False
        self._batches = 0
        self._gauge_at = 1
        self.depth = 0
        self.transfer_s = 0.0

    @staticmethod
    def on(
        next_batch: Callable[[], tuple[Tag, Any] | None],
        device: torch.device,
    ) -> DevicePrefetcher[Tag]:
        """Makes a device's prefetcher, which copies ahead if the device has streams."""
        copies = CopyStream(device) if streams.has_streams(device) else None
        return DevicePrefetcher(next_batch, device, copies)

    @property
    def has_batch(self) -> bool:
        """True if :meth:`take` will return a batch, unless it is discarded before."""
        return bool(self._held)

    def take(self) -> tuple[Tag, Any] | None:
        """The next batch, on the device; None if none is held or loaded.

        Does not wait for a copy: the stream that trains does. The first batch after a
        pause is returned before others are fetched; later calls fetch at most two
        first.

        Raises:
            Whatever ``next_batch`` raises; batches held then stay held.
        """
        self.transfer_s = 0.0
        if self._copies is None:
            got = self._next_batch()
            taken_s = time.perf_counter()
            if got is not None and self._device.type != "cpu":
                got = got[0], to_device(got[1], self._device)
            self.transfer_s = time.perf_counter() - taken_s
            return got
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        if self._batches >= self._gauge_at:
            self._gauge()
        ahead = self._ahead_pays
        for _ in range(2):
            goal = 1 + self.depth if ahead else 1
            if len(self._held) >= goal or not self._fetch(self._copies):
                break
        if not self._held:
            self._ahead_pays = False
            return None
        return self._yield_batch(self._copies, self._held.popleft())

    def discard(self) -> None:
        """Drops held batches, when leases were returned or the epoch ended."""
        for held in self._held:
            if held.copy is not None:
                self._being_read.append((held.copy.fence, held.copy.source))
        self._held.clear()
        self._ahead_pays = False

    def _fetch(self, copies: CopyStream) -> bool:
        """Takes one batch from the loader and begins its copy; False if none came."""
        got = self._next_batch()
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
        except torch.OutOfMemoryError:
            self._most_depth = self.depth = self.depth // 2
            logger.warning(
                "no device memory left to prefetch a batch: from now on %d are "
                "prefetched",
                self.depth,
            )
            return
        held.data, held.copied_bytes = held.copy.data, copied_bytes
        taken_s = time.perf_counter() - began_s
        self.transfer_s += taken_s
        self._pin_trial.observe(pin, taken_s, copied_bytes)

    def _yield_batch(self, copies: CopyStream, held: _Held[Tag]) -> tuple[Tag, Any]:
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

    def _gauge(self) -> None:
        """Updates the prefetch depth, between two steps, after the memory peak."""
        memory = self._read()
        warm = self._batches >= WARM_BATCHES
        self._gauge_at = self._batches + GAUGE_EVERY_BATCHES if warm else WARM_BATCHES
        if warm:
            self._peak.observe(memory.active_bytes, memory.peak_bytes)
        held_bytes = sum(held.copied_bytes for held in self._held)
        usable_bytes = min(memory.free_bytes + held_bytes, memory.total_bytes)
        peak_bytes = self._peak.value_bytes
        fitting = decide_prefetch(
            memory.total_bytes, usable_bytes, self._batch_bytes, peak_bytes
        )
        self.depth = min(fitting, self._most_depth)
