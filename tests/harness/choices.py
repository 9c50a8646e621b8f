"""Choices of ``auto`` as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster, predict
from elche.coordination.auto import auto_chooser, first_choice
from elche.coordination.sync import step_grants

WINDOWS, ALONE, STEPS = ("async", ()), ("sync", (-1,)), ("sync", ())
"""A policy, and the places of the ranks that train, () for all."""


def choice(cluster: MeasuredCluster, policy: str, places: Sequence[int] = ()) -> Choice:
    """A policy on the ranks at some places of a cluster; () for all of them."""
    kept = [place % cluster.world_size for place in places]
    left_out = [r for at, r in enumerate(cluster.ranks) if kept and at not in kept]
    return Choice(
        policy=policy,
        anchor=2,
        excluded=tuple(left_out),
        prediction=predict(policy, cluster, kept or None),
        reason="as the test wants",
    )


class Wanted:
    """In place of a `Chooser`: one choice after the other, the last one for good.

    Attributes:
        script: policies, each with the places of the ranks that train, () for all.
    """

    script: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __init__(self, **_: Any) -> None:
        self._left = [*self.script]

    def fix_update(self, update: str) -> None:
        """The first choice was made."""
        policy, places = self.script[0]
        is_local = policy != "sync" and not places
        assert update == ("parameters" if is_local else "gradients")

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        """The next one."""
        policy, places = self._left[0]
        if len(self._left) > 1:
            del self._left[0]
        return choice(cluster, policy, places)


def want(monkeypatch: pytest.MonkeyPatch, *script: tuple[str, tuple[int, ...]]) -> None:
    """``auto`` chooses by a script."""
    monkeypatch.setattr(Wanted, "script", script)
    monkeypatch.setattr(auto_chooser, "Chooser", Wanted)


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Choices by a script after two measured steps; windows unless it is called."""

    def choose(*script: tuple[str, tuple[int, ...]], steps: int = 2) -> None:
        def is_due(first: Any, *_: Any) -> bool:
            return bool(first._measures.count >= steps)

        want(monkeypatch, *script)
        monkeypatch.setattr(first_choice.FirstChoice, "is_due", is_due)
        monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)

    choose(WINDOWS)
    return choose
