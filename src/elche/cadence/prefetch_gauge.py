"""Prefetch depth on a device, decided from figures of its memory.

Memory of prefetched batches counts as free; otherwise a full buffer would lower the
next depth. The activation peak is the memory that a step uses beyond the memory in use
between steps.
"""

from __future__ import annotations

import math
from typing import final

MAX_DEPTH = 2
"""Most batches held ahead. Loading runs in the training thread, so more than two hide
nothing more."""
CAREFUL_DEPTH = 1
"""Most batches held ahead before the activation peak is known."""
RESERVE_FRACTION = 0.1
"""Fraction of the device's memory that is kept free."""
UNMEASURED_PART = 4
"""Divisor of usable memory for batches before the activation peak is known."""
PIN_ROUNDS = 4
"""Batches copied each way before the cheaper way is kept."""


def decide_prefetch(
    total_bytes: int, usable_bytes: int, batch_bytes: int, peak_bytes: int | None
) -> int:
    """Returns the batches to hold on the device ahead of the current one.

    Args:
        total_bytes: memory of the device.
        usable_bytes: memory that is free between steps, or holds prefetched batches.
        batch_bytes: size of one batch; 0 if unknown, or if no tensor is moved.
        peak_bytes: memory of a step beyond that in use between steps; None before it
            is measured.
    """
    free_bytes = usable_bytes - math.ceil(total_bytes * RESERVE_FRACTION)
    most = MAX_DEPTH
    if peak_bytes is None:
        free_bytes, most = free_bytes // UNMEASURED_PART, CAREFUL_DEPTH
    else:
        free_bytes -= peak_bytes
    return max(0, min(most, free_bytes // batch_bytes)) if batch_bytes else 0


@final
class ActivationPeak:
    """Activation peak, from an allocator's figures between steps.

    The allocator's peak is a maximum since the process began. So only a new maximum
    measures the steps since the last call: at an old peak, another number of batches
    may have been prefetched. If a program resets the peak at the end of every
    step, the activation peak counts as unknown.

    Attributes:
        value_bytes: largest observed peak, None before the first.
    """

    def __init__(self) -> None:
        self.value_bytes: int | None = None
        self._last_peak_bytes: int | None = None

    def observe(self, active_bytes: int, peak_bytes: int) -> None:
        """Records the memory in use between two steps, and the allocator's peak."""
        beyond_bytes = peak_bytes - active_bytes
        if peak_bytes != self._last_peak_bytes and beyond_bytes > 0:
            self.value_bytes = max(self.value_bytes or 0, beyond_bytes)
        self._last_peak_bytes = peak_bytes


@final
class PinTrial:
    """Decides whether pinned staging memory is cheaper for the training thread.

    A copy into pinned memory makes the transfer asynchronous, but runs in the training
    thread. Which takes longer depends on the machine. The first batches alternate
    between both ways, and the least time per byte decides.
    """

    def __init__(self) -> None:
        self._best = {True: math.inf, False: math.inf}
        self._seen = {True: 0, False: 0}

    @property
    def pin(self) -> bool:
        """True if the next batch should be pinned."""
        if min(self._seen.values()) >= PIN_ROUNDS:
            return self._best[True] < self._best[False]
        return self._seen[True] <= self._seen[False]

    def observe(self, pinned: bool, host_s: float, batch_bytes: int) -> None:
        """Records the training thread's time (s) for a batch's copy."""
        if self._seen[pinned] < PIN_ROUNDS and batch_bytes > 0:
            self._seen[pinned] += 1
            self._best[pinned] = min(self._best[pinned], host_s / batch_bytes)
