"""One rank of a pool as its parent sees it, and what became of a case on it."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from tests.harness.rank_main import Place, Task

ExitWay: TypeAlias = Literal["raised", "died", "hung"]

ABORT_S = 60.0
EXIT_S = 60.0
LOG_TAIL_CHARS = 6000


@dataclass(frozen=True)
class RankError:
    """How a case failed on one rank.

    Attributes:
        way: the case raised, its process died, or it was still running at the deadline.
        text: the traceback, or what is known of the end.
        log: what the rank wrote during the case; for a rank that hung, its stacks too.
    """

    way: ExitWay
    text: str
    log: str

    def __str__(self) -> str:
        log = f"\n--- its output ---\n{self.log.rstrip()}" if self.log.strip() else ""
        return f"{self.way}: {self.text.rstrip()}{log}"


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank: a value, or an error."""

    rank: int
    value: Any = None
    error: RankError | None = None


class RankCaseFailed(AssertionError):  # noqa: N818 - a verdict, as pytest's Failed
    """A case failed on at least one rank; the message holds what each of those said.

    Attributes:
        outcomes: one per rank, in rank order.
    """

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        parts = [
            f"=== rank {outcome.rank} {outcome.error}"
            for outcome in outcomes
            if outcome.error is not None
        ]
        super().__init__("\n".join([title, *parts]))
        self.outcomes = tuple(outcomes)


@final
@dataclass
class RankProcess:
    """One process with the connection to it and its log."""

    place: Place
    process: ForkServerProcess
    connection: Connection
    log_path: Path
    log_start_bytes: int = 0

    def send(self, task: Task | None) -> None:
        self.log_start_bytes = self._log_size_bytes()
        try:
            self.connection.send_bytes(pickle.dumps(task))
        except BrokenPipeError:
            return  # its end is reported by poll()

    def poll(self) -> Outcome | None:
        """Returns the outcome if there is one by now."""
        alive = self.process.is_alive()
        try:
            if self.connection.poll():
                succeeded, payload = pickle.loads(self.connection.recv_bytes())
                if succeeded:
                    return Outcome(self.place.rank, value=payload)
                return self._failed("raised", payload)
        except (EOFError, ConnectionResetError):
            alive = False
        if alive:
            return None
        self.end()
        return self._failed("died", f"exit code {self.process.exitcode}")

    def abort(self, reason: str) -> Outcome:
        """Ends a rank that hangs; its stacks are in the log afterwards."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(ABORT_S)
        self.end()
        return self._failed("hung", reason)

    def end(self) -> None:
        """Kills the process if it still runs, and waits until it is gone."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def finish(self) -> Outcome:
        """Lets an idle rank end by itself and tells how it did."""
        self.send(None)
        self.process.join(EXIT_S)
        if self.process.is_alive():
            return self.abort(f"did not exit within {EXIT_S:g} s")
        self.end()
        if self.process.exitcode:
            return self._failed("died", f"exit code {self.process.exitcode}, at exit")
        return Outcome(self.place.rank)

    def _failed(self, way: ExitWay, text: str) -> Outcome:
        return Outcome(self.place.rank, error=RankError(way, text, self._log()))

    def _log_size_bytes(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def _log(self) -> str:
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(self.log_start_bytes)
            return log.read().decode(errors="replace")[-LOG_TAIL_CHARS:]
