"""The processes of a run's ranks: forwarded signals, and the first failure.

Only processes that were added here are ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol, final

from elche.coordination.protocol.events import Interrupted
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator

GRACE_S = 10.0
"""Grace (s) of the others after a rank has failed, and of all after Ctrl-C."""
LATE_S = (3.0, 4.0)
"""Grace (s) of unresponsive ranks after a deadline: until SIGTERM, then SIGKILL."""
HEED_S = 4.0
"""Grace (s) after other signals; plus KILL_AFTER_S it is below `docker stop`'s 10."""
KILL_AFTER_S = 5.0
OWN_END_S = 30.0
"""Grace (s) of ranks that end by themselves after a signal, with a checkpoint."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SCRIPTS: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for ranks whose scripts handle them; without a handler they end the run."""


class RankProcess(Protocol):
    """Interface of a rank's process, to watch and to end it."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the start, and on another machine."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""

    def send_signal(self, signal: int, /) -> None:
        """Sends a signal to the process, which has not ended."""

    async def wait(self) -> int:
        """Waits for its end."""


@final
class RankProcesses:
    """The ranks' processes, by rank.

    Args:
        server: the run's coordinator, notified of ends and of interruptions.
        fence: kills a process that the run continues without.
        end_waiting: see `RankBackend`.

    Attributes:
        signal: the first signal that the launcher was sent, if any.
        interruption: that signal in words, or "".
        ended: ranks in the order in which their processes ended.
        terminated: ranks that the launcher had to terminate.
        failed_s: time of the first failure (s), by the monotonic clock.
        on_dropped: starts a replacement of a dead rank, if allowed.
    """

    def __init__(
        self,
        server: KeptCoordinator,
        fence: Callable[[RankProcess], Awaitable[None]],
        end_waiting: Callable[[], None],
    ) -> None:
        self._server = server
        self._end_waiting = end_waiting
        self._processes: dict[int, RankProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._waits_s: asyncio.Queue[tuple[int | None, float]] = asyncio.Queue()
        server.on_end = self._run_ended
        # A rank that the others continue without must not reconnect.
        server.on_lost = lambda rank: fence(self._processes[rank])
        self.signal: signal.Signals | None = None
        self.interruption = ""
        self.ended: list[int] = []
        self.terminated: tuple[int, ...] = ()
        self.failed_s: float | None = None
        self.on_dropped: Callable[[int], Awaitable[None]] | None = None

    def add(self, rank: int, process: RankProcess) -> None:
        """Adds the process of a rank, and watches it."""
        self._processes[rank] = process
        self._watchers.append(asyncio.ensure_future(self._watch(rank, process)))

    def handle_signals(self) -> None:
        """Routes signals of this process to ranks that handle them, or ends the run."""

        def take(number: signal.Signals) -> None:
            to = self._processes.values() if number in SCRIPTS else ()
            handling = [process for process in to if _handles(process, number)]
            for process in handling:
                send_signal(process, number)
            if not handling:
                self.interrupt(number)

        for number in (*SIGNALS, *SCRIPTS):
            if number in SIGNALS or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                with contextlib.suppress(NotImplementedError):
                    asyncio.get_running_loop().add_signal_handler(number, take, number)

    def interrupt(self, number: signal.Signals) -> None:
        """Handles a signal to the launcher: ends all ranks; a second one kills them.

        Connected ranks receive the reason from the coordinator and raise it. The other
        ranks receive the signal itself, unless the terminal has sent it already. Ranks
        that handle SIGTERM receive it too; if all ranks of the run handle or heed it,
        all receive it, and end with a result or a checkpoint. A replacement that has
        not joined yet just ends.

        Args:
            number: the signal.
        """
        if self.signal is not None:
            self._kill()
            return
        self._end_waiting()
        self.signal, status = number, self._server.status
        self.interruption = f"interrupted: the launcher received {number.name}"
        sent = number if number in SIGNALS else signal.SIGTERM
        ranks = self._processes if sent == signal.SIGTERM else ()
        handling = [rank for rank in ranks if _handles(self._processes[rank], sent)]
        heed = all(
            rank in handling or rank in status.heeding
            for rank, process in self._processes.items()
            if process.returncode is None and not self._server.has_dropped(rank)
        )
        is_alone = [*self._processes] == [0] and not status.connected
        if not heed:
            self._server.take(Interrupted(by=number.name))
        # A terminal signals the ranks itself.
        is_sent = number == signal.SIGINT and has_terminal()
        heed_s = GRACE_S if is_sent else HEED_S
        for rank, process in self._processes.items():
            is_deaf = heed or rank in handling or rank not in status.connected
            if is_deaf and not is_sent:
                send_signal(process, sent)
        if heed or handling or is_alone:
            heed_s = OWN_END_S
        self._waits_s.put_nowait((None, heed_s))

    def _run_ended(self, kind: str) -> None:
        """Ends ranks that outlast a deadline; other failures show in exit codes.

        Ranks that never connect, as those of a plain script, end by themselves.
        """
        if kind != "deadline":
            return
        self._note_failure()
        self._waits_s.put_nowait((None, GRACE_S))
        for after_s, number in zip(
            LATE_S, (signal.SIGTERM, signal.SIGKILL), strict=True
        ):
            asyncio.get_running_loop().call_later(after_s, self._end_late, number)

    def _end_late(self, number: signal.Signals) -> None:
        """Signals ranks that are still connected after a deadline has ended the run."""
        for rank, process in self._processes.items():
            if rank in self._server.status.connected:
                send_signal(process, number)

    async def wait(self) -> None:
        """Waits for all ranks; after a failure or a signal only for a grace period."""
        deadline_s = math.inf
        while len(self.ended) < len(self._processes):
            left_s = None if math.isinf(deadline_s) else deadline_s - time.monotonic()
            try:
                rank, patience_s = await asyncio.wait_for(self._waits_s.get(), left_s)
            except asyncio.TimeoutError:
                break
            if rank is not None:
                code = self._processes[rank].returncode or 0
                self.ended.append(rank)
                await self._server.rank_ended(rank, self._as_signal(code))
                has_dropped = self._server.has_dropped(rank)
                if code and not has_dropped:
                    self._note_failure()
                    patience_s = GRACE_S
                if has_dropped and self.on_dropped and math.isinf(deadline_s):
                    await self.on_dropped(rank)
            if self._run_is_over:
                self._end_waiting()
                patience_s = min(patience_s, GRACE_S)
            deadline_s = min(deadline_s, time.monotonic() + patience_s)
        await self._terminate()

    def _as_signal(self, code: int) -> int:
        """Returns an exit code; negative if the rank ended by the launcher's signal.

        Ranks that stop cleanly after a signal exit with the shell's code, 128 + signal.
        """
        asked = () if self.signal is None else (self.signal, signal.SIGTERM)
        return 128 - code if code - 128 in asked else code

    @property
    def _run_is_over(self) -> bool:
        """True if all running processes are outside the run, or not in it yet."""
        running = self._processes.keys() - set(self.ended)
        return all(map(self._server.has_dropped, running))

    def _note_failure(self) -> None:
        if self.failed_s is None:
            self.failed_s = time.monotonic()

    async def close(self) -> None:
        """Kills running processes, and waits for their end."""
        self._kill()
        await asyncio.gather(*self._watchers)

    def exit_codes(self) -> tuple[int, ...]:
        """Each rank's exit code; a signal counts as 128 + its number."""
        ended = [self._processes[rank].returncode for rank in sorted(self._processes)]
        codes = [1 if code is None else code for code in ended]
        return tuple(128 - code if code < 0 else code for code in codes)

    def failed_first(self) -> int | None:
        """The rank whose failure came first; None if no rank has failed.

        A rank that was ended by another's failure, or here, counts only if no other has
        failed. A rank whose loss the run survived does not count.
        """
        codes = self.exit_codes()
        ended = *self.ended, *self.terminated
        failed = [r for r in ended if codes[r] and not self._server.has_dropped(r)]
        excused = self._server.aborted_by_others.union(self.terminated)
        own = [rank for rank in failed if rank not in excused]
        return next(iter(own or failed), None)

    async def _terminate(self) -> None:
        """Ends running processes: by SIGTERM, then by SIGKILL."""
        running = {r for r, p in self._processes.items() if p.returncode is None}
        known = running.union(self.ended)
        self.ended += [rank for rank in self._processes if rank not in known]
        self.terminated = tuple(sorted(running))
        for rank in running:
            send_signal(self._processes[rank], signal.SIGTERM)
        if running:
            await asyncio.wait(self._watchers, timeout=KILL_AFTER_S)
        await self.close()

    def _kill(self) -> None:
        for process in self._processes.values():
            send_signal(process, signal.SIGKILL)

    async def _watch(self, rank: int, process: RankProcess) -> None:
        await process.wait()
        self._waits_s.put_nowait((rank, math.inf))


def send_signal(process: RankProcess, number: signal.Signals) -> None:
    """Sends a signal to a process that has not ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _handles(process: RankProcess, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or there is no /proc
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int("0" + status.partition("SigCgt:\t")[2][:16], 16)
        return bool(caught >> (number - 1) & 1)
    return False


def has_terminal() -> bool:
    """True if this process group is the one that a terminal sends Ctrl-C to."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
