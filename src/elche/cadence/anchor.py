"""Batches per window on the slowest rank, tuned by synchronisation overhead."""

from __future__ import annotations

import math
from copy import copy
from statistics import median_low
from typing import final

MAX_GROWTH = 2
"""Largest factor by which an anchor may grow in one report."""
SYNC_HISTORY = 3
"""Number of latest synchronisations in the median time."""
ROOM_SLACK = 2
"""Ratio of an anchor to the requested room above which it falls at once. Below it, the
anchor falls by one per report, so that noise moves it little."""
_ROUNDING = 1e-9


@final
class Anchor:
    """The anchor of El Che and its auto-tune.

    Args:
        first: initial anchor, clamped to the limits.
        minimum: lower limit of the auto-tune; clamped to the maximum.
        maximum: upper limit; 0 switches El Che off, and the anchor is 1.
        overhead_target: largest wanted time of a synchronisation as a fraction of
            the window's time.

    Attributes:
        maximum: upper limit of the anchor; 0 if El Che is off.
    """

    def __init__(
        self, first: int, minimum: int, maximum: int, overhead_target: float
    ) -> None:
        self._minimum, self.maximum = minimum, maximum
        self._room = 1
        self._raised_from: int | None = None
        self._target = overhead_target
        self._sync_ms: list[float] = []
        self._value = max(self.minimum, min(first, maximum))

    @property
    def enabled(self) -> bool:
        """True if El Che is on."""
        return self.maximum > 0

    @property
    def value(self) -> int:
        """Number of batches that the slowest rank runs per window."""
        return self._value if self.enabled else 1

    @property
    def minimum(self) -> int:
        """Lower limit of the auto-tune; a nudge may go below it."""
        return max(1, min(max(self._minimum, self._room), self.maximum))

    def observe_sync(self, sync_ms: float, reference_ms: float) -> None:
        """Records the time of a synchronisation, and tunes the anchor.

        Args:
            sync_ms: time of the synchronisation (ms), positive.
            reference_ms: time per batch on the slowest rank (ms), positive.
        """
        self._sync_ms = [*self._sync_ms, float(sync_ms)][-SYNC_HISTORY:]
        if not self.enabled or len(self._sync_ms) < 2:
            return
        typical_ms = median_low(self._sync_ms)
        overhead = typical_ms / (self._value * reference_ms)
        if overhead > self._target:
            wanted = min(self._value * overhead / self._target, self.maximum)
            wanted = max(math.ceil(wanted - _ROUNDING), self.minimum)
            wanted = min(wanted, self._value * MAX_GROWTH)
            if wanted > self._value:
                self._value, self._raised_from = wanted, None
        elif overhead < self._target / 2 and self._value > self.minimum:
            self._fall_to(max(self._fallen(overhead), self.minimum))

    def make_room(self, least: int) -> bool:
        """Raises the anchor to ``least`` at once, as far as the maximum allows.

        ``least`` stays the auto-tune's lower limit until the next call. If a later
        value is much lower (`ROOM_SLACK`), the earlier one came from a pause and not
        the link. The anchor then falls at once, to ``least`` or to its value before the
        raise, whichever is higher.

        Returns:
            True if the anchor has changed.
        """
        self._room = least
        before = self._value
        if not self.enabled:
            return False
        least = min(self._room, self.maximum)
        if least > before:
            if self._raised_from is None:
                self._raised_from = before
            self._value = least
        elif self._raised_from is not None and before > ROOM_SLACK * least:
            self._fall_to(min(before, max(least, self._raised_from)))
        return self._value != before

    def nudge_down(self, factor: float) -> bool:
        """Multiplies the anchor by ``factor``, clamped to 0.1 to 1.0, rounded up.

        Returns:
            True if the anchor has become lower.
        """
        before = self._value
        shorter = math.ceil(before * min(max(factor, 0.1), 1.0) - _ROUNDING)
        self._fall_to(min(before, max(1, shorter)))
        return self._value < before

    def without_room(self) -> Anchor:
        """Returns a copy without a requested room, for ranks that measure again."""
        other = copy(self)
        other._room = 1
        return other

    def _fallen(self, overhead: float) -> int:
        """Returns the anchor, moved halfway to the one with half the target overhead.

        If room was requested, returns the anchor less one: noisy requests move it
        little.
        """
        if self._room > 1:
            return self._value - 1
        wanted = math.ceil(2 * self._value * overhead / self._target - _ROUNDING)
        return (wanted + self._value) // 2  # a spike lengthens a window once

    def _fall_to(self, value: int) -> None:
        self._value = value
        if self._raised_from is not None and value <= self._raised_from:
            self._raised_from = None
