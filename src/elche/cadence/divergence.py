"""Guard against diverging ranks, evaluated at every synchronisation.

Between two synchronisations each rank trains alone. The distance of rank ``r`` from the
others is its *divergence* ``||θ_r − θ̄|| / ||θ̄||``, where ``θ̄`` is their agreed mean.
The guard checks it before El Che may lengthen the windows, and shortens the windows
when the ranks diverge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import final

from elche.errors import named_ranks

RECENT_WINDOWS = 3
"""Windows in the median that detects a fast rise."""
MEMORY_WINDOWS = 9
"""Windows in the median that detects a slow rise."""
RISE = 2.0
"""Factor over the usual divergence that is too much; a fall by it is recovery. Noise of
±30 % never exceeds a factor of 1.86.
"""
CEILING = 1.0
"""Divergence that is always too much: the distance equals the consensus' own norm."""
NUDGE_FACTOR = 0.5
"""Factor on the anchor when the windows are shortened."""
SETTLE_WINDOWS = 3
"""First windows, in which only non-finite contributions shorten windows."""
HOLD_WINDOWS = 8
"""Windows without growth after the first nudge; each further nudge doubles it."""
MAX_HOLD_WINDOWS = 64
"""Most windows without growth after a nudge."""
NEGLIGIBLE = 1e-4
"""Lower bound of divergences; smaller ones count as this."""
NAMED_RANKS = 4
"""Most ranks that a reason names; beyond, it gives their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision of the guard after a synchronisation.

    Attributes:
        hold: whether the anchor must not grow now.
        nudge: factor to multiply the anchor by, above 0 and below 1
            (``ElChe.nudge_anchor_down``); None leaves it.
        reason: description of the observation.
    """

    hold: bool
    nudge: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Window:
    """One window: its divergence, its batches, and the run's batches at its middle."""

    level: float
    batches: int
    middle: float

    def predicts(self, batches: int, middle: float) -> float:
        """Returns the most divergence of a healthy later window, based on this one.

        In a healthy run divergence grows with the window's batches no faster than
        linearly (as the square root where steps are mostly noise), and with a
        learning rate that warms up, linearly in the batches since the start.
        """
        longer = max(1.0, batches / self.batches)
        return self.level * longer * max(1.0, middle / self.middle)


@final
class DivergenceGuard:
    """Shortens the windows when divergence rises well above its usual level.

    A window's level is the divergence of the furthest rank. The usual level is the
    median that the last three ordinary windows predict for this one, or the last nine
    if that is less. Predictions allow for a longer window and a learning-rate warmup.

    A window is *suspect* from the square root of `RISE` times the usual level, above
    the ceiling, or if a contribution was not finite. The anchor must not grow then. A
    window is *too far* from `RISE` times the usual level (or ceiling, or not finite). A
    suspect window followed by one too far shortens the windows, unless divergence falls
    by `RISE` again. So a single spike has no effect, and a jump or exponential growth
    is answered at its second window. The new level then becomes the usual one: a
    plateau (such as a higher learning rate) shortens windows once, further growth at
    every second window.

    Differences from the reference algorithm (flodl 0.5.3, three rises in a row above
    0.05): it is relative to the run's own level instead of a constant. Three rises
    happen in noise, a doubling does not. It runs before the anchor grows. A non-finite
    contribution counts as the furthest, not as 0.
    """

    def __init__(self) -> None:
        self._usual: list[_Window] = []
        self._windows = 0
        self._batches = 0
        self._suspect = False
        self._last_level = 0.0
        self._hold_left = 0
        self._nudges = 0

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        """Evaluates a synchronisation, before El Che receives its timings.

        A window without batches gives no information and changes nothing.

        Args:
            divergences: divergence of every rank, in order; not negative. NaN or
                infinity means that the rank's contribution was not finite and was
                excluded.
            window_batches: batches of the window, consistently either of all ranks or
                of the slowest. Divergence grows with them.

        Returns:
            The decision about the anchor.
        """
        broken = tuple(r for r, d in enumerate(divergences) if not math.isfinite(d))
        levels = [(d, -r) for r, d in enumerate(divergences) if r not in broken]
        level, place = max([(NEGLIGIBLE, 0), *levels])
        held = self._hold_left > 0
        if window_batches == 0:
            return Verdict(hold=held, nudge=None, reason="a window without batches")
        window = _Window(level, window_batches, self._batches + window_batches / 2)
        usual = self._usual_level(window)
        rises = level / usual if usual > 0.0 else 1.0
        above = level >= CEILING
        too_far = bool(broken)
        if self._windows >= SETTLE_WINDOWS:
            too_far |= above or rises >= RISE
        suspect = too_far or above or rises >= math.sqrt(RISE)
        recovers = not broken and level * RISE < self._last_level
        nudges = too_far and self._suspect and not recovers

        self._windows += 1
        self._batches += window_batches
        self._last_level = level
        self._suspect = suspect and not nudges
        self._hold_left = self._next_hold(nudges)
        if nudges and not broken:
            self._usual = [window]
        elif not too_far:
            self._usual = [*self._usual, window][-MEMORY_WINDOWS:]

        compared = f", {rises:.2f} times the usual {usual:.3g}" if usual > 0.0 else ""
        reason = f"divergence {level:.3g} of rank {-place}{compared}"
        if broken:
            few = len(broken) <= NAMED_RANKS
            whose = named_ranks(broken) if few else f"{len(broken)} ranks"
            reason = f"the contribution of {whose} is not finite"
        reason += f", above the ceiling {CEILING:g}" if above else ""
        if nudges:
            reason += f", the second such window in a row: windows × {NUDGE_FACTOR:g}"
            return Verdict(hold=True, nudge=NUDGE_FACTOR, reason=reason)
        if suspect:
            reason += ": windows do not grow until that is clear"
        elif held:
            reason += ": windows do not grow so soon after a shortening"
        return Verdict(hold=suspect or held, nudge=None, reason=reason)

    def _usual_level(self, window: _Window) -> float:
        """Returns the most divergence ordinary for this window; 0.0 if unknown."""
        if not self._usual:
            return 0.0
        levels = [w.predicts(window.batches, window.middle) for w in self._usual]
        return min(median_low(levels), median_low(levels[-RECENT_WINDOWS:]))

    def _next_hold(self, nudges: bool) -> int:
        """Returns the number of next windows without growth; counts the nudge."""
        if not nudges:
            return max(0, self._hold_left - 1)
        doubled = HOLD_WINDOWS << min(self._nudges, MAX_HOLD_WINDOWS.bit_length())
        self._nudges += 1
        return min(doubled, MAX_HOLD_WINDOWS)
