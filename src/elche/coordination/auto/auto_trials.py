"""``auto``: periodic new measurements of ranks that were left out.

Under windows of averaged parameters by a batch of their own, one rank after the other;
where the fastest device trains alone in place of ``sync``, by some steps of all ranks
when an epoch begins. Either takes at most a hundredth of the time. Pure.
"""

from __future__ import annotations

import math
from typing import final

from elche.cadence.goodput import MeasuredCluster, predict
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.auto.auto_windows import RunningWindows
from elche.coordination.protocol.instructions import Instruction

TRIAL_COST = 0.01
"""Part of the time that timing left out ranks again may take."""
TRIAL_GRANTS = 4
"""Grants of steps after which it is decided whether ``sync`` stays this time."""


@final
class Trials:
    """When such a trial is due, and whose turn it is."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._next = 0

    def begin(self, now_s: float) -> None:
        """Other ranks are left out from now on."""
        self._last_s, self._next = now_s, 0

    def hurry(self) -> None:
        """Steps of all are due: nothing is known of a rank that has joined."""
        self._last_s = -math.inf

    def try_out(
        self, windows: RunningWindows, gauge: Gauge, samples: int, now_s: float
    ) -> list[Instruction]:
        """Leases a batch to the rank whose turn it is, if that is due.

        Args:
            windows: that run.
            gauge: knows what a batch takes on each rank.
            samples: of a batch of these windows.
            now_s: the time.
        """
        left_out = windows.choice.left_out
        if not left_out:
            return []
        rank = left_out[self._next % len(left_out)]
        batch_s = gauge.batch_s(rank, samples)
        # Others may wait for it, and its drift weighs in the mean of one window.
        if not self._may_take(batch_s + windows.choice.prediction.window_s, now_s):
            return []
        leased = windows.policy.try_out(rank, batch_s)
        if leased:
            self._last_s = now_s
            self._next += 1
        return leased

    def are_steps_due(
        self, cluster: MeasuredCluster, ahead_steps: int, now_s: float
    ) -> bool:
        """Whether steps of all ranks would cost little of the time without them.

        Args:
            cluster: what was measured.
            ahead_steps: that are granted before any is measured.
            now_s: the time.
        """
        step_s = predict("sync", cluster).window_s
        return self._may_take((TRIAL_GRANTS + 2 * ahead_steps) * step_s, now_s)

    def _may_take(self, cost_s: float, now_s: float) -> bool:
        return (now_s - self._last_s) * TRIAL_COST >= cost_s
