"""Deadlines of a step's waits: of the plan, of earlier steps, and of the first ones."""

from __future__ import annotations

import pytest

from elche.pipeline.peers.patience import WARM_STEPS, Forecast, Patience
from elche.schedule.actions import parse_action

EARLY, LATE = parse_action("1RECV_F0"), parse_action("0RECV_B3")
FORECAST = Forecast({EARLY: 0.5, LATE: 2.0}, makespan_s=2.5)
FORM = "step [8, 4]"


def warmed(duration_s: float = 2.5) -> Patience:
    """After the first steps of a form, and one more."""
    patience = Patience(300.0, 4.0, 5.0)
    for _ in range(WARM_STEPS + 1):
        patience.begin(FORM)
        patience.ended(duration_s)
    patience.foresee(FORECAST)
    patience.begin(FORM)
    return patience


def test_first_steps_have_all_the_time() -> None:
    patience = Patience(300.0, 4.0, 5.0)
    patience.foresee(FORECAST)
    for _ in range(WARM_STEPS):
        patience.begin(FORM)
        assert patience.deadline_s == 300.0
        assert patience.arrivals_s == {}
        patience.ended(40.0)
    patience = warmed()
    patience.begin("step [9, 4]")
    assert patience.deadline_s == 300.0, "another form may compile"
    assert patience.arrivals_s == {}


def test_a_message_is_due_at_a_multiple_of_its_predicted_time() -> None:
    patience = warmed()
    assert patience.arrivals_s == {EARLY: 0.5, LATE: 2.0}
    assert patience.stretch == 4.0
    assert patience.deadline_s == pytest.approx(4 * 2.5 + 5)


def test_longer_steps_stretch_the_prediction() -> None:
    assert warmed(5.0).stretch == pytest.approx(8.0)
    assert warmed(0.1).stretch == 4.0


def test_nothing_takes_longer_than_the_timeout() -> None:
    assert warmed(400.0).deadline_s == 300.0


def test_an_evaluation_has_its_own_times() -> None:
    patience = warmed()
    for _ in range(WARM_STEPS + 1):
        patience.begin("evaluate [64, 4]")
        assert patience.deadline_s == 300.0
        patience.ended(30.0)
    patience.begin("evaluate [64, 4]")
    assert patience.deadline_s == pytest.approx(4 * 30.0 + 5)
