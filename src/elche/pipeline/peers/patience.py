"""Deadlines of a step's waits, from its plan and from earlier steps. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from elche.schedule.actions import StageAction

WARM_STEPS = 2
REMEMBERED_STEPS = 20


@dataclass(frozen=True)
class Forecast:
    """What a training step is predicted to take, in seconds.

    Attributes:
        arrivals_s: of the message of each receive, from the step's begin.
        makespan_s: of the step.
    """

    arrivals_s: Mapping[StageAction, float]
    makespan_s: float


@final
class Patience:
    """Deadlines of the waits of a step.

    A message is due at a multiple of the time at which the plan, under measured times,
    predicts it; a wait for it may go on for a while beyond that. So of several ranks
    that wait for one another the one next to the cause gives up first, and names it.

    The first steps of a form (shapes, training or evaluation) may take the whole time
    that is allowed: something may still compile for them.

    Args:
        timeout_s: the most.
        factor: times the prediction, or the longest of the last steps.
        grace_s: beyond it.
    """

    def __init__(self, timeout_s: float, factor: float, grace_s: float) -> None:
        self._timeout_s = timeout_s
        self._factor = factor
        self.grace_s = grace_s
        self._form = ""
        self._seen: Counter[str] = Counter()
        self._durations_s: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED_STEPS)
        )
        self._forecast: Forecast | None = None

    def begin(self, form: str) -> None:
        """A step of this form begins."""
        self._seen[form] += 1
        self._form = form

    def ended(self, duration_s: float) -> None:
        """It has taken so long."""
        if self._is_warm:
            self._durations_s[self._form].append(duration_s)

    def foresee(self, forecast: Forecast) -> None:
        """Takes a prediction for training steps."""
        self._forecast = forecast

    @property
    def deadline_s(self) -> float:
        """Seconds that a wait of this step may last, for whatever it is."""
        durations_s = self._durations_s.get(self._form)
        if not self._is_warm or not durations_s:
            return self._timeout_s
        return min(self._timeout_s, self._factor * max(durations_s) + self.grace_s)

    @property
    def arrivals_s(self) -> Mapping[StageAction, float]:
        """When messages of the training step that begins are predicted to come.

        Seconds from its begin, by the receive; empty if unknown. They are due at
        `stretch` times that.
        """
        if self._forecast is None or not self._is_warm:
            return {}
        return self._forecast.arrivals_s

    @property
    def stretch(self) -> float:
        """What the predicted times are multiplied with."""
        durations_s = self._durations_s.get(self._form)
        if self._forecast is None or not durations_s:
            return self._factor
        # A larger batch than the one that was measured takes longer.
        predicted_s = max(self._forecast.makespan_s, 1e-9)
        return self._factor * max(1.0, max(durations_s) / predicted_s)

    @property
    def _is_warm(self) -> bool:
        return self._seen[self._form] > WARM_STEPS
