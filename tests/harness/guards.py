"""Guards as users may write them, which a coordinator imports by their names."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from elche.cadence.divergence import Guard, Verdict


class _Stateless(Guard):
    """What all of these have in common."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state


class Halving(_Stateless):
    """Halves the anchor whatever it sees."""

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        return Verdict(hold=True, nudge=0.5, reason="as I said")


class Shortest(_Stateless):
    """Brings the anchor down at once, keeps it there, and notes what it was asked."""

    asked: list[tuple[float, ...]] = []  # noqa: RUF012 - of all of the class

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        self.asked.append(tuple(divergences))
        return Verdict(hold=True, nudge=0.1, reason="as short as can be")


class Raising(_Stateless):
    """Fails when it is asked."""

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        raise ZeroDivisionError("no spread")


class Leaving(_Stateless):
    """Ends its process, as it thinks."""

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        raise SystemExit(3)


class Mute(_Stateless):
    """Forgets to answer."""

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        return None  # type: ignore[return-value]


class Hanging(_Stateless):
    """Does not answer, as long as nobody releases it."""

    release = threading.Event()

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        self.release.wait()
        raise ZeroDivisionError("released")


class Demanding(Halving):
    """Wants an argument."""

    def __init__(self, rise: float) -> None:
        self.rise = rise


class Unfinished(Guard):
    """Lacks what a guard must have."""


class Outer:
    """Holds a guard."""

    class Inner(Halving):
        """Is found through the other."""


class NoSubclass:
    """Is something else."""
