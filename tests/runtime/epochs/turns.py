"""Turn taking of threads under virtual clocks: one runs, always the same one.

A thread keeps its turn until it waits or computes. Then the one goes on that can and
whose clock is behind, so that runs are the same under any load, and a run in which no
thread can go on ends at once with what each waits for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

LONGEST_TURN_S = 60.0
"""Real seconds after which a thread that never comes back ends the run."""
MOST_TURNS = 20_000
CLOCK_TICK_S = 1e-6


class StuckError(AssertionError):
    """No thread can go on, or they go on and on."""


@dataclass(slots=True)
class _Wait:
    """What a thread waits for, until when on its clock, and since when it is there."""

    ready: Callable[[], bool]
    until_s: float
    why: str
    ready_s: float | None = None


class Turns:
    """Gives the turn to one of several threads.

    Args:
        ranks: number of threads.

    Attributes:
        clocks: virtual seconds of each rank.
    """

    def __init__(self, ranks: int) -> None:
        self.clocks = [0.0] * ranks
        self._changed = threading.Condition()
        self._ranks: dict[int, int] = {}  # by thread
        self._waits: dict[int, _Wait] = {}
        self._running: int | None = None
        self._taken = 0
        self._now_s = 0.0
        self._stuck = ""

    def begin(self, rank: int) -> None:
        """This thread is a rank from now on; waits for the others, and for its turn."""
        self._ranks[threading.get_ident()] = rank
        with self._changed:
            self._waits[rank] = _Wait(lambda: True, math.inf, "its turn")
            if len(self._waits) == len(self.clocks):
                self._pass_on()
            self._await_turn(rank)

    def end(self, rank: int) -> None:
        """This thread takes no more turns."""
        with self._changed:
            del self._ranks[threading.get_ident()]
            if self._running == rank:
                self._now_s = self.clocks[rank]
                self._pass_on()

    def wait(
        self, rank: int, ready: Callable[[], bool], why: str, most_s: float = math.inf
    ) -> bool:
        """Lets others run until something holds, or a time has passed; whether it does.

        Raises:
            StuckError: it never will.
        """
        with self._changed:
            self._now_s = self.clocks[rank]
            until_s = self._now_s + most_s
            self._waits[rank] = _Wait(ready, until_s, why)
            self._pass_on()
            self._await_turn(rank)
            return ready()

    def compute(self, rank: int, seconds: float) -> None:
        """Some work of this rank, during which others may run."""
        self.clocks[rank] += seconds
        self.wait(rank, lambda: True, "its turn")

    def patch_clocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the ranks' threads read their virtual clocks, and sleep by them."""
        sleep = time.sleep

        def sleeps(seconds: float) -> None:
            rank = self._ranks.get(threading.get_ident())
            if rank is None:
                sleep(seconds)
            else:
                self.compute(rank, seconds)

        monkeypatch.setattr(time, "sleep", sleeps)
        for name in ("monotonic", "perf_counter"):
            real = getattr(time, name)

            def read(real: Callable[[], float] = real) -> float:
                rank = self._ranks.get(threading.get_ident())
                if rank is None:
                    return real()
                self.clocks[rank] += CLOCK_TICK_S
                return self.clocks[rank]

            monkeypatch.setattr(time, name, read)

    def _pass_on(self) -> None:
        """Chooses the next one: the earliest that can run, or whose time is up."""
        choices = []
        for rank, wait in self._waits.items():
            if wait.ready():
                if wait.ready_s is None:
                    wait.ready_s = max(self.clocks[rank], self._now_s)
                choices.append((wait.ready_s, rank))
            elif wait.until_s < math.inf:
                choices.append((wait.until_s, rank))
        self._taken += 1
        if self._waits and (not choices or self._taken > MOST_TURNS):
            whys = (f"rank {rank} for {w.why}" for rank, w in self._waits.items())
            self._stuck = f"after {self._taken} turns: {'; '.join(whys)}"
        elif choices:
            at_s, self._running = min(choices)
            self.clocks[self._running] = max(self.clocks[self._running], at_s)
        self._changed.notify_all()

    def _await_turn(self, rank: int) -> None:
        def has_turn() -> bool:
            return self._running == rank or bool(self._stuck)

        came = self._changed.wait_for(has_turn, LONGEST_TURN_S)
        del self._waits[rank]
        if self._stuck or not came:
            raise StuckError(self._stuck or f"rank {self._running} keeps its turn")
