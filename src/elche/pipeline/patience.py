"""How long a step may wait for other ranks, from how long steps have taken. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import final

WARM_STEPS = 2
REMEMBERED_STEPS = 20


@final
class Patience:
    """Deadline of the waits of a step.

    The first steps of a form (shapes, training or evaluation) may take the whole time
    that is allowed: something may still compile for them.

    Args:
        timeout_s: the most.
        factor: times the longest of the last steps.
        least_s: the least.
    """

    def __init__(self, timeout_s: float, factor: float, least_s: float) -> None:
        self._timeout_s = timeout_s
        self._factor = factor
        self._least_s = least_s
        self._form = ""
        self._seen: Counter[str] = Counter()
        self._durations_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def begin(self, form: str) -> None:
        """A step of this form begins."""
        self._seen[form] += 1
        self._form = form

    def ended(self, duration_s: float) -> None:
        """A training step has taken so long."""
        if self._is_warm:
            self._durations_s.append(duration_s)

    @property
    def deadline_s(self) -> float:
        """Seconds that a wait of this step may last."""
        if not self._is_warm or not self._durations_s:
            return self._timeout_s
        expected_s = self._factor * max(self._durations_s)
        return min(self._timeout_s, max(self._least_s, expected_s))

    @property
    def _is_warm(self) -> bool:
        return self._seen[self._form] > WARM_STEPS
