"""The run's coordinator in its launcher: a child, restarted when it dies.

The launcher holds the listening socket, so ranks reach a restarted coordinator at the
same address, and the journal, from which the new one restores its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, final

from elche.coordination.protocol.events import Event, Failed, Input, RankLost
from elche.coordination.protocol.instructions import Instruction
from elche.coordination.protocol.outbox import Outbox
from elche.runtime.coordinator_process.link import (
    LENGTH,
    Begin,
    Copy,
    Fence,
    Journal,
    Status,
    Stop,
    pack,
)

logger = logging.getLogger(__name__)

MODULE: Final = "elche.runtime.coordinator_process.serving"
MOST_DEATHS: Final = 10
"""Give up after this many consecutive crashes without a message from a rank."""
ANSWER_S: Final = 10.0
LOOK_S: Final = 0.005
STOP_S: Final = 5.0


@final
class KeptCoordinator:
    """Starts the coordinator, keeps its journal, and sends it the launcher's events.

    Args:
        world_size: ranks that the run begins with.
        key: the run's secret.
        survives: the launcher fences lost ranks.
        listener: socket that ranks connect to.

    Attributes:
        address: address of ``listener``.
        status: status of the run, as last received.
        aborted_by_others: ranks aborted for a reason other than their own failure.
        on_lost: called with a lost rank that the run survives, before the others are
            notified: its process must be ended.
        on_end: called with the kind of `Abort` that ends the run.
        on_message: called once with each message that records are made of, in the
            journal's order; set it before the start.
    """

    def __init__(
        self,
        world_size: int,
        key: bytes,
        listener: socket.socket,
        *,
        survives: bool,
    ) -> None:
        self._begin = partial(Begin, world_size, key, survives)
        self._listener = listener
        host, port, *_ = listener.getsockname()
        self.address: tuple[str, int] = (str(host), int(port))
        self.status = Status(members=frozenset(range(world_size)))
        self.aborted_by_others: set[int] = set()
        self.on_lost: Callable[[int], Awaitable[None]]
        self.on_end: Callable[[str], None] = lambda kind: None
        self.on_message: Callable[[Event | Instruction], None] | None = None
        self._copy: bytes | None = None
        self._journal: list[bytes] = []
        self._commands: Outbox[Input] = Outbox()
        self._writer: asyncio.StreamWriter | None = None
        self._barren = 0  # consecutive crashes without a message from a rank
        self._story: tuple[str, ...] = ()
        self._is_stopping = self._wants_story = False
        self._gave_up = ""
        self._running: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def aborted(self) -> str | None:
        """Reason of the run's end, if it has ended."""
        return self.status.aborted or self._gave_up or None

    @property
    def pid(self) -> int | None:
        """Process id of the current coordinator."""
        process = self._process
        return None if self._writer is None or process is None else process.pid

    def start(self) -> None:
        """Starts the process; ranks may connect from now on."""
        self._running = asyncio.ensure_future(self._run())

    async def stop(self, *, wants_story: bool = False) -> tuple[str, ...]:
        """Ends the process and closes the listening socket.

        Returns:
            The event log, as far as it is kept; () if not requested.
        """
        self._is_stopping, self._wants_story = True, wants_story
        self._end_process()
        if self._running is not None:
            _, late = await asyncio.wait([self._running], timeout=STOP_S)
            if late:
                self._wants_story = False
                self._end_process()
                await self._running
        self._listener.close()
        return self._story

    def _end_process(self) -> None:
        """Ends the coordinator after all ranks: requests its event log, or kills it."""
        if self._wants_story:
            self._send(Stop())
        elif self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def take(self, what: Input) -> None:
        """Sends the coordinator an event that this launcher saw."""
        self._commands.add(what)
        self._send(what)

    def _send(self, message: object) -> None:
        """Sends a message to the process; a restarted one receives it at its start."""
        if self._writer is not None:
            self._writer.write(pack(message))

    async def rank_ended(self, rank: int, code: int) -> None:
        """Reports the end of a rank's process; waits until the coordinator received it.

        Args:
            rank: number of the rank, whether or not it ever joined.
            code: its exit code; negative for a signal.
        """
        if code > 0:
            error = f"its process ended with code {code}"
            self.take(Failed(rank=rank, error=error, traceback=""))
        else:
            self.take(RankLost(rank=rank))
        given = self._commands.taken + len(self._commands.rest())
        waits = bool(self._journal or self._copy)  # a coordinator has served
        deadline_s = time.monotonic() + ANSWER_S
        while waits and not self._gave_up and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_S)
            waits = self._commands.taken < given

    def has_dropped(self, rank: int) -> bool:
        """True if the run continues without a rank, which died or never joined."""
        return rank not in self.status.members

    async def _run(self) -> None:
        while True:
            try:
                code = await self._serve()
            except OSError as error:
                self._give_up(f"the coordinator cannot be started: {error}")
                return
            if self._is_stopping:
                return
            self._barren += 1
            how = f"ended with code {code}" if code >= 0 else f"was killed ({-code})"
            if self._barren == MOST_DEATHS:
                self._give_up(f"the coordinator {how}, {MOST_DEATHS} times in a row")
                return
            logger.warning("the coordinator %s: a new one continues the run", how)

    def _give_up(self, why: str) -> None:
        """Closes the listening socket, so that ranks fail to reconnect and end."""
        logger.error("%s: the run ends", why)
        self._journal.clear()
        self._gave_up = why
        self._listener.close()

    async def _serve(self) -> int:
        """Runs one coordinator process to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        process = self._process = await self._spawn(theirs)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = writer
        shows, journal = self.on_message is not None, tuple(self._journal)
        self._send(self._begin(shows=shows, copy=self._copy, journal=journal))
        for what in self._commands.rest():
            self._send(what)
        if self._is_stopping:
            self._end_process()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = pickle.loads(await reader.readexactly(length))
                if isinstance(message, Fence):  # which the coordinator waits for
                    await self.on_lost(message.rank)
                    self._send(message)
                else:
                    self._handle(message)
        self._writer = None
        writer.close()
        return await process.wait()

    async def _spawn(self, link: socket.socket) -> asyncio.subprocess.Process:
        descriptors = link.fileno(), self._listener.fileno()
        # Import elche from here, and nothing from the working directory.
        path = os.pathsep.join(filter(None, sys.path))
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            *map(str, descriptors),
            pass_fds=descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )

    def _handle(self, message: Any) -> None:
        if isinstance(message, Journal):
            self._journal.append(message.data)
            self._barren = 0 if message.is_of_ranks else self._barren
            self._commands.acknowledge(message.commands)
            if self.on_message is not None:
                for one in message.messages:
                    self.on_message(one)
        elif isinstance(message, Copy):
            self._copy, self._barren = message.record, 0
            self._journal.clear()  # the copy replaces all pieces so far
        elif isinstance(message, Status):
            before, self.status = self.status, message
            self.aborted_by_others |= message.aborted_by_others
            if message.end_kind and message.end_kind != before.end_kind:
                self.on_end(message.end_kind)
        elif isinstance(message, logging.LogRecord):
            if (log := logging.getLogger(message.name)).isEnabledFor(message.levelno):
                log.handle(message)
        elif isinstance(message, Stop):
            self._story = message.story
