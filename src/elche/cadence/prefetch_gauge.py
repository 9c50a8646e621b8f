"""Prefetch depth on a device, and whether the whole data set fits.

Figures in, decision out. What is free counts together with what prefetched batches
already hold, or a filled buffer would talk the next decision down; the activation peak
is what a step takes beyond what lies there between two steps.
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
    *,
    total_bytes: int,
    free_bytes: int,
    held_bytes: int,
    batch_bytes: int,
    peak_bytes: int | None,
    max_depth: int = MAX_DEPTH,
) -> int:
    """Batches to hold on the device ahead of the one in use.

    Usable is what is free or already held by prefetched batches, less the reserve.
    Before the activation peak is known a quarter of it goes to batches; afterwards
    everything beyond the peak.

    Args:
        total_bytes: memory of the device.
        free_bytes: what could be allocated between two steps, memory cached by the
            allocator for reuse included. Free, not used: the two are easily swapped.
        held_bytes: what prefetched batches hold; not part of ``free_bytes``.
        batch_bytes: one batch; 0 while unknown, or if nothing of it is moved.
        peak_bytes: what a step takes beyond what lies there between two steps; None
            before it is measured.
        max_depth: most batches held ahead.

    Returns:
        From 0 to ``max_depth``, never more for less memory.
    """
    usable_bytes = free_bytes + held_bytes - math.ceil(total_bytes * RESERVE_FRACTION)
    if peak_bytes is None:
        spare_bytes = usable_bytes // UNMEASURED_PART
        max_depth = min(max_depth, CAREFUL_DEPTH)
    else:
        spare_bytes = usable_bytes - peak_bytes
    if not batch_bytes:
        return 0
    return max(0, min(max_depth, spare_bytes // batch_bytes))


@final
class ActivationPeak:
    """The activation peak, from an allocator's figures between steps.

    The allocator's peak is a maximum since the process began, so only a new maximum
    says something about the steps since the last look: the rest would mix a peak with
    a buffer that is filled differently now. A program that resets the peak at the end
    of every step hides it; it then counts as unknown.
    """

    __slots__ = ("_last_peak_bytes", "_value_bytes")

    def __init__(self) -> None:
        self._last_peak_bytes: int | None = None
        self._value_bytes: int | None = None

    @property
    def value_bytes(self) -> int | None:
        """The largest seen, None before the first."""
        return self._value_bytes

    def observe(self, active_bytes: int, peak_bytes: int) -> None:
        """Takes the figures between two steps, after at least one whole step.

        Args:
            active_bytes: memory in use now.
            peak_bytes: the most that was in use at once.
        """
        if peak_bytes == self._last_peak_bytes:
            return
        self._last_peak_bytes = peak_bytes
        beyond_bytes = peak_bytes - active_bytes
        if beyond_bytes > 0:
            self._value_bytes = max(self._value_bytes or 0, beyond_bytes)


@final
class PinTrial:
    """True if staging batches in pinned memory is cheaper for the training thread.

    Copying into pinned memory makes the transfer itself asynchronous, but it is a copy
    in the training thread; which of the two takes longer depends on the machine. The
    first batches go both ways in turn, and the least time per byte decides.
    """

    __slots__ = ("_best", "_seen")

    def __init__(self) -> None:
        self._best = {True: math.inf, False: math.inf}
        self._seen = {True: 0, False: 0}

    @property
    def is_over(self) -> bool:
        """True if it is decided."""
        return min(self._seen.values()) >= PIN_ROUNDS

    @property
    def pin(self) -> bool:
        """True if to pin the next batch."""
        if self.is_over:
            return self._best[True] < self._best[False]
        return self._seen[True] <= self._seen[False]

    def observe(self, pinned: bool, host_s: float, batch_bytes: int) -> None:
        """Takes what a batch's copy cost the training thread.

        Args:
            pinned: which way it went.
            host_s: seconds until the thread could go on.
            batch_bytes: size of the batch; one without bytes says nothing.
        """
        if self.is_over or batch_bytes <= 0:
            return
        self._seen[pinned] += 1
        self._best[pinned] = min(self._best[pinned], host_s / batch_bytes)
