"""At which batch boundary a window ends, when windows end by wall time."""

from __future__ import annotations

import math
from typing import final

from elche.cadence.throughput import CostEstimate, check_int, check_measure
from elche.errors import ConfigError


def should_close(
    elapsed_s: float, batch_s: float, wall_s: float, batches_done: int
) -> bool:
    """Whether a window ends at this batch boundary.

    It ends at the boundary nearest to its planned length: now, if one more batch
    would end further from ``wall_s`` than now; when both are as near, one more
    batch runs. Counts fixed beforehand lose 5 to 25 % to jitter; this does not.

    Args:
        elapsed_s: seconds since the window began.
        batch_s: seconds that the next batch is expected to take.
        wall_s: planned length of the window in seconds.
        batches_done: batches that this rank finished in the window.

    Returns:
        True when the window should end before another batch begins. Never
        before one batch is done, and always once ``wall_s`` has passed.

    Raises:
        ConfigError: a time is not a number or negative.
    """
    for name, value in (
        ("elapsed_s", elapsed_s),
        ("batch_s", batch_s),
        ("wall_s", wall_s),
    ):
        if math.isnan(value) or value < 0.0:
            raise ConfigError(f"{name} must be a time in seconds, got {value!r}")
    if batches_done < 1:
        return False
    if elapsed_s >= wall_s:
        return True
    return elapsed_s + batch_s - wall_s > wall_s - elapsed_s


@final
class WindowClock:
    """One rank's view of its windows: how long its batches take, when to stop.

    Holds no clock: the caller passes ``now_s`` of any steady clock. Durations
    run from boundary to boundary, so they are delivered times (waiting for data,
    transfer, compute). The smoothed batch time outlives the window.
    """

    __slots__ = (
        "_batch",
        "_batches",
        "_batches_done",
        "_last_s",
        "_start_s",
        "_wall_s",
    )

    def __init__(self) -> None:
        self._batch = CostEstimate()
        self._start_s = self._last_s = 0.0
        self._wall_s = 0.0
        self._batches = 1
        self._batches_done = 0

    @property
    def batch_s(self) -> float:
        """Smoothed seconds per batch of this rank; 0.0 before the first one."""
        return self._batch.value

    @property
    def batches_done(self) -> int:
        """Batches finished in the present window."""
        return self._batches_done

    @property
    def elapsed_s(self) -> float:
        """Seconds from the window's start to the last batch boundary."""
        return self._last_s - self._start_s

    def start(self, now_s: float, wall_s: float, batches: int) -> None:
        """Begins a window.

        Args:
            now_s: the present time in seconds.
            wall_s: planned length of the window; 0.0 when there are no timings
                yet, the window then ends by count.
            batches: planned batches of this rank; rules only while ``wall_s`` is
                0.0, afterwards it is a prediction.

        Raises:
            ConfigError: the length is negative or not finite, or the number of
                batches below 1.
        """
        self._wall_s = check_measure("wall_s", wall_s)
        self._batches = check_int("batches", batches, 1)
        self._start_s = self._last_s = now_s
        self._batches_done = 0

    def batch_done(self, now_s: float, *, timed: bool = True) -> bool:
        """Counts a finished batch and decides about the next one.

        Args:
            now_s: the present time in seconds, not before the last call's.
            timed: False keeps this batch out of the estimate (a compilation).

        Returns:
            True when the window ends here.
        """
        taken_s = now_s - self._last_s
        self._last_s = now_s
        self._batches_done += 1
        if timed and taken_s > 0.0:
            self._batch.observe(taken_s)
        if self._wall_s == 0.0:
            return self._batches_done >= self._batches
        return should_close(
            max(self.elapsed_s, 0.0), self.batch_s, self._wall_s, self._batches_done
        )
