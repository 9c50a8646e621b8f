"""Time of recent steps, of all who take part in them together. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, final

from elche.coordination.protocol.events import StepsDone

SETTLING_GRANTS = 4
"""Grants that are not counted, beside those made before: shares still move."""
MEASURED_GRANTS, MEASURED_STEPS, MEASURED_S = 4, 12, 1.0
"""At least so many, in at least so long: their median is what a step takes."""
TRIED_STEPS = 4
"""The same in a trial, whose grants are single steps."""


class _Measured(NamedTuple):
    """Steps of a grant: seconds of each, and of its reduction as far as it showed."""

    steps: int
    step_s: float
    shown_s: float


@final
class StepGauge:
    """Measures steps since its last beginning, the last ones only.

    Args:
        ahead_steps: granted before the beginning, which do not count.
    """

    def __init__(self, ahead_steps: int) -> None:
        self._recent: deque[_Measured] = deque()
        self._ahead = ahead_steps
        self._settling = SETTLING_GRANTS
        self._is_trial = False

    def begin(self, ahead_steps: int = 0, *, is_trial: bool = False) -> None:
        """Forgets what was measured: shares or members are others.

        Args:
            ahead_steps: that are granted already.
            is_trial: few steps will do.
        """
        self._recent.clear()
        self._ahead, self._settling = ahead_steps, SETTLING_GRANTS
        self._is_trial = is_trial

    def again(self) -> None:
        """Measures the same once more."""
        self._recent.clear()

    def take(self, reports: Sequence[StepsDone], steps: int) -> float:
        """Takes in the reports of a grant of so many steps; returns seconds of one."""
        step_s = max(each.busy_s + each.sync_wait_s for each in reports) / steps
        if self._ahead > 0:
            self._ahead -= steps
        elif self._settling > 0:
            self._settling -= 1
        else:
            if self.is_full:
                self._recent.popleft()
            shown_s = min(each.sync_wait_s for each in reports) / steps
            self._recent.append(_Measured(steps, step_s, shown_s))
        return step_s

    @property
    def is_full(self) -> bool:
        """True if enough is measured."""
        steps = sum(each.steps for each in self._recent)
        if self._is_trial:
            return steps >= TRIED_STEPS
        taken_s = sum(each.steps * each.step_s for each in self._recent)
        is_enough = steps >= MEASURED_STEPS and taken_s >= MEASURED_S
        return is_enough and len(self._recent) >= MEASURED_GRANTS

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return median(each.step_s for each in self._recent)

    @property
    def shown_s(self) -> float:
        """Seconds of a reduction, as far as backward did not hide it."""
        return min(each.shown_s for each in self._recent)
