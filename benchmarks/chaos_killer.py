"""Random kills in a run of `benchmarks/chaos.py`, and its end."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from elche.runtime.coordinator_process.kept_coordinator import MODULE

RANKS: Final = "ranks"
COORDINATOR: Final = "coordinator"
BOTH: Final = "both"
VICTIMS: Final = RANKS, COORDINATOR, BOTH
PATIENCE_S = 60.0
"""For the last newcomers to train, after the last kill."""


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """How a run is disturbed.

    Attributes:
        ranks: of the run.
        seconds: of the run, from its first batch.
        mtbf_s: mean time between two kills; infinite: never.
        victims: who is killed: one of `VICTIMS`.
    """

    ranks: int
    seconds: float
    mtbf_s: float
    victims: str = RANKS


@final
class Killer:
    """A thread that kills ranks now and then, and ends the run when its time is over.

    It never kills the last one that trains. The run ends when newcomers have taken all
    places again.

    Args:
        plan: of the run.
        draws: when and whom.
        over: file that tells the ranks that the time is over.

    Attributes:
        kills: ranks that were killed, in order.
        coordinators: how many coordinators were.
        trained: who has trained, in order.
    """

    def __init__(self, plan: KillPlan, draws: random.Random, over: Path) -> None:
        self.kills: list[int] = []
        self.trained: list[int] = []
        self.coordinators = 0
        self._plan, self._draws, self._over = plan, draws, over
        self._began_s = self._end_s = math.inf
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Of the run, from its first batch to its end; 0 where none was trained."""
        return self._end_s - self._began_s if self.trained else 0.0

    @property
    def living(self) -> list[int]:
        """Ranks that train."""
        return [rank for rank in self.trained if rank not in self.kills]

    def begin(self, rank: int, pid: int, trains: bool) -> None:
        """A rank has begun its process, or has trained on its first batch."""
        with self._changed:
            self._pids[rank] = pid
            if trains:
                self._began_s = min(self._began_s, time.monotonic())
                self.trained.append(rank)
            self._changed.notify_all()

    def stop(self) -> None:
        """Ranks begin to leave, or the run is over: none is killed any more."""
        with self._changed:
            self._end_s = min(self._end_s, time.monotonic())
            self._changed.notify_all()

    def end(self) -> None:
        """The run is over."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            self._wait(lambda: bool(self.trained), math.inf)
            until_s = self._began_s + self._plan.seconds
            while not self._is_stopped:
                pause_s = self._draws.expovariate(1.0) * self._plan.mtbf_s
                at_s = time.monotonic() + pause_s
                self._wait(lambda: False, min(at_s, until_s))
                if self._is_stopped or at_s >= until_s:
                    break
                self._kill()
            self._wait(self._is_whole, until_s + PATIENCE_S)
            self._over.touch()

    @property
    def _is_stopped(self) -> bool:
        return self._end_s < math.inf

    def _is_whole(self) -> bool:
        return len(self.living) == self._plan.ranks

    def _wait(self, until: Callable[[], bool], deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        self._changed.wait_for(
            lambda: self._is_stopped or until(),
            None if math.isinf(left_s) else left_s,
        )

    def _kill(self) -> None:
        draws, victims = self._draws, self._plan.victims
        if victims == COORDINATOR or (victims == BOTH and draws.random() < 0.5):
            if (pid := coordinator_pid(os.getpid())) is not None:
                os.kill(pid, signal.SIGKILL)
                self.coordinators += 1
            return
        living = self.living
        whom = sorted({*self._pids} - {*self.kills})
        if len(living) < 2:
            whom = [rank for rank in whom if rank not in living]
        if whom:
            rank = self._draws.choice(whom)
            os.kill(self._pids[rank], signal.SIGKILL)
            self.kills.append(rank)


def coordinator_pid(launcher: int) -> int | None:
    """The process of a launcher's coordinator, None between two of them."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if MODULE.encode() in words:
                    return int(pid)
    return None
