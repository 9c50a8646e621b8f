"""Prefetch depth on a device: figures of its memory in, decision out.

What is free counts together with what prefetched batches already hold, or a filled
buffer would talk the next decision down; the activation peak is what a step takes
beyond what lies there between two steps.
"""

from __future__ import annotations

import math
from typing import final

MAX_DEPTH = 2
"""Most batches held ahead. Loading happens in the training thread, so more than two
hide nothing more."""
CAREFUL_DEPTH = 1
"""Most batches held ahead before the activation peak is known."""
RESERVE_FRACTION = 0.1
"""Part of the device's memory that is left alone."""
UNMEASURED_PART = 4
"""Before the activation peak is known, batches get a quarter of what is usable."""
PIN_ROUNDS = 4
"""Batches copied each way before the cheaper one is kept."""


def decide_prefetch(
    total_bytes: int, usable_bytes: int, batch_bytes: int, peak_bytes: int | None
) -> int:
    """Batches to hold on the device ahead of the one in use, up to `MAX_DEPTH`.

    Args:
        total_bytes: memory of the device.
        usable_bytes: what is free between two steps, or held by prefetched batches.
        batch_bytes: one batch; 0 while unknown, or if nothing of it is moved.
        peak_bytes: what a step takes beyond what lies there between two steps; None
            before it is measured.
    """
    spare_bytes = usable_bytes - math.ceil(total_bytes * RESERVE_FRACTION)
    most = MAX_DEPTH
    if peak_bytes is None:
        spare_bytes, most = spare_bytes // UNMEASURED_PART, CAREFUL_DEPTH
    else:
        spare_bytes -= peak_bytes
    return max(0, min(most, spare_bytes // batch_bytes)) if batch_bytes else 0


@final
class ActivationPeak:
    """The activation peak, from an allocator's figures between steps.

    The allocator's peak is a maximum since the process began, so only a new maximum
    says something about the steps since the last look: the rest would mix a peak with
    a buffer that is filled differently now. A program that resets the peak at the end
    of every step hides it; it then counts as unknown.

    Attributes:
        value_bytes: the largest seen, None before the first.
    """

    def __init__(self) -> None:
        self.value_bytes: int | None = None
        self._last_peak_bytes: int | None = None

    def observe(self, active_bytes: int, peak_bytes: int) -> None:
        """Takes the memory in use between two steps, and the most that ever was."""
        beyond_bytes = peak_bytes - active_bytes
        if peak_bytes != self._last_peak_bytes and beyond_bytes > 0:
            self.value_bytes = max(self.value_bytes or 0, beyond_bytes)
        self._last_peak_bytes = peak_bytes


@final
class PinTrial:
    """True if staging batches in pinned memory is cheaper for the training thread.

    Copying into pinned memory makes the transfer itself asynchronous, but it is a copy
    in the training thread; which of the two takes longer depends on the machine. The
    first batches go both ways in turn, and the least time per byte decides.
    """

    def __init__(self) -> None:
        self._best = {True: math.inf, False: math.inf}
        self._seen = {True: 0, False: 0}

    @property
    def pin(self) -> bool:
        """True if to pin the next batch."""
        if min(self._seen.values()) >= PIN_ROUNDS:
            return self._best[True] < self._best[False]
        return self._seen[True] <= self._seen[False]

    def observe(self, pinned: bool, host_s: float, batch_bytes: int) -> None:
        """Takes the seconds of the training thread that a batch's copy cost."""
        if self._seen[pinned] < PIN_ROUNDS and batch_bytes > 0:
            self._seen[pinned] += 1
            self._best[pinned] = min(self._best[pinned], host_s / batch_bytes)
