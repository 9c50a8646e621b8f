"""The default policy's one line, from the coordinator to the user."""

from __future__ import annotations

import pytest

import elche
from elche.coordination.auto import windows_advice
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

LINE = "policy='async' is predicted"


def _heard() -> list[list[str]]:
    """What is said of windows in a run that names no policy, and in one that does."""
    return [_said({}), _said({"policy": "sync"})]


def _said(options: dict[str, str]) -> list[str]:
    said: list[str] = []
    model, optimizer, loader = begin(Task(), **options)
    run = current_run()
    assert run is not None
    run.notifications.emit = said.append
    for _ in range(2):
        for x, y, *_ in loader:
            take_step(model, optimizer, x, y)
    elche.shutdown()
    return [line for line in said if LINE in line]


def test_only_a_run_that_names_no_policy_says_it_once(
    ranks2: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_advice, "ADVICE_GRANTS", 2)
    monkeypatch.setattr(windows_advice, "advice", lambda cluster: f"{LINE} to win")
    found = ranks2.serve(_heard)
    assert found == [[[f"elche: {LINE} to win"], []], [[], []]]
