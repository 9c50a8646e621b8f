"""What ``auto`` chooses, as a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster, predict
from elche.coordination.auto import auto_chooser, first_choice
from elche.coordination.sync import step_grants

WINDOWS, ALONE, STEPS = "async", "alone", "sync"
"""Choices: those of a policy, and that the last rank trains alone."""


class Wanted:
    """In place of a chooser: what a test wants, one choice after the other.

    Attributes:
        choices: the last one stays.
        left_out: ranks that each of them does without.
        steps: that are measured before the first one.
    """

    choices: tuple[str, ...] = (WINDOWS,)
    left_out: tuple[int, ...] = ()
    steps = 2

    def __init__(self, **_: Any) -> None:
        self._left = list(self.choices)

    def fix_update(self, update: str) -> None: ...

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        kind = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        policy = STEPS if kind == ALONE else kind
        out = tuple(cluster.ranks[:-1]) if kind == ALONE else self.left_out
        places = [at for at, rank in enumerate(cluster.ranks) if rank not in out]
        return Choice(
            policy=policy,
            anchor=2,
            left_out=out,
            prediction=predict(policy, cluster, places if out else None),
            alternatives=(),
            reason="as the test wants",
        )


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Wanted]]:
    """Choices come as a test wants, after few measurements."""

    def is_due(first: Any, *_: Any) -> bool:
        return bool(first._measures.count >= Wanted.steps)

    monkeypatch.setattr(auto_chooser, "Chooser", Wanted)
    monkeypatch.setattr(first_choice.FirstChoice, "is_due", is_due)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    yield Wanted
    Wanted.choices, Wanted.left_out, Wanted.steps = (WINDOWS,), (), 2
