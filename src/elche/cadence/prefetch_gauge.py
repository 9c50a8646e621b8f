"""Prefetch depth on a device, and whether the whole data set fits.

Figures in, decision out. What is free counts together with what prefetched batches
already hold, or a filled buffer would talk the next decision down; the activation peak
is what a step takes beyond what lies there between two steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from elche.cadence.throughput import check_int, check_measure
from elche.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory between two steps, in bytes.

    Attributes:
        total_bytes: all there is.
        free_bytes: what could be allocated now, memory cached by the allocator for
            reuse included. Free, not used: the two are easily swapped.
        held_bytes: what prefetched batches hold; not part of ``free_bytes``.

    Raises:
        ConfigError: a figure is negative, or more is free than there is.
    """

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0

    def __post_init__(self) -> None:
        check_int("total_bytes", self.total_bytes, 0)
        check_int("free_bytes", self.free_bytes, 0)
        check_int("held_bytes", self.held_bytes, 0)
        if self.free_bytes + self.held_bytes > self.total_bytes:
            raise ConfigError(
                f"expected free and held bytes within the device's "
                f"{self.total_bytes}, got {self.free_bytes} + {self.held_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchNeeds:
    """Memory that batches and training take, in bytes.

    Attributes:
        batch_bytes: one batch; 0 while unknown, or if nothing of it is moved.
        activation_peak_bytes: what a step takes beyond what lies there between two
            steps; None before it is measured.

    Raises:
        ConfigError: a figure is negative.
    """

    batch_bytes: int
    activation_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        check_int("batch_bytes", self.batch_bytes, 0)
        if self.activation_peak_bytes is not None:
            check_int("activation_peak_bytes", self.activation_peak_bytes, 0)


def decide_prefetch(
    memory: DeviceMemory, needs: PrefetchNeeds, max_depth: int = MAX_DEPTH
) -> int:
    """Reads the gauge.

    Usable is what is free or already held by prefetched batches, less the reserve.
    Before the activation peak is known a quarter of it goes to batches; afterwards
    everything beyond the peak.

    Args:
        memory: the device between two steps.
        needs: what one batch and a step take.
        max_depth: most batches held ahead.

    Returns:
        Batches to hold on the device ahead of the one in use: from 0 to ``max_depth``,
        never more for less memory.
    """
    reserve_bytes = math.ceil(memory.total_bytes * RESERVE_FRACTION)
    usable_bytes = memory.free_bytes + memory.held_bytes - reserve_bytes
    peak_bytes = needs.activation_peak_bytes
    ceiling = max_depth
    if peak_bytes is None:
        spare_bytes = usable_bytes // UNMEASURED_PART
        ceiling = min(ceiling, CAREFUL_DEPTH)
    else:
        spare_bytes = usable_bytes - peak_bytes
    depth = 0
    if needs.batch_bytes:
        depth = max(0, min(ceiling, spare_bytes // needs.batch_bytes))
    return depth


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

        Raises:
            ConfigError: a figure is negative.
        """
        check_int("active_bytes", active_bytes, 0)
        check_int("peak_bytes", peak_bytes, 0)
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

        Raises:
            ConfigError: the time is negative or not finite.
        """
        check_measure("host_s", host_s)
        if self.is_over or batch_bytes <= 0:
            return
        self._seen[pinned] += 1
        self._best[pinned] = min(self._best[pinned], host_s / batch_bytes)
