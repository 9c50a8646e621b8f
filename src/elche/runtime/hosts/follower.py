"""A launcher of any host but the first: starts its ranks, and does as the first says.

It ends its ranks when that one is gone; the ranks see the same on their own
connections, and end by an error that says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final, final

from elche.comm.control.addresses import outlive_cuts
from elche.comm.control.frames import GREETING_BYTES, FrameCodec, nonce_of
from elche.coordination.liveness import BEAT_S, SILENT_S
from elche.coordination.protocol.host_messages import (
    FromHost,
    HostBeat,
    HostInterrupted,
    HostRefused,
    HostWelcome,
    RankEnded,
    RunEnded,
    SignalRank,
)
from elche.coordination.protocol.wire import FROM_LEADER, from_wire, to_wire
from elche.errors import CommunicationError, ConfigError, ProtocolError
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.process.launch import LaunchConfig, rank_environment, start_rank
from elche.runtime.process.launcher_watch import PIPE
from elche.runtime.process.launchers import rank_environments
from elche.runtime.process.rank_output import RankOutput
from elche.runtime.process.rank_processes import (
    GRACE_S,
    KILL_AFTER_S,
    OWN_END_S,
    SIGNALS,
    RankProcess,
    send_signal,
)

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.2
LAST_WORD_S: Final = 10.0
"""For the first host's launcher to say how the run has ended, when all ranks have."""
CUT_OFF_S: Final = SILENT_S + 2 * BEAT_S
"""Silence of the first host after which the others go on without this one: that has
seen the same from its side, and sooner."""
_CHUNK_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class FollowResult:
    """How a run ended, as the first host's launcher says.

    Attributes:
        exit_code: of the run.
        reason: why it was ended, "" if it was not.
    """

    exit_code: int
    reason: str


def follow_leader(config: LaunchConfig) -> FollowResult:
    """Starts this host's ranks when all hosts are there, and waits for the run's end.

    Raises:
        CommunicationError: the first host cannot be reached in time.
        ConfigError: the hosts do not fit together.
    """
    assert config.hosts is not None
    return asyncio.run(_follow(config, config.hosts))


async def _follow(config: LaunchConfig, hosts: HostsConfig) -> FollowResult:
    link = await _connected(hosts)
    follower = _Follower(config, hosts, link)
    try:
        return await follower.run()
    finally:
        await follower.close()


async def _connected(hosts: HostsConfig) -> _LeaderLink:
    """Connects as soon as the first host listens."""
    deadline_s = time.monotonic() + hosts.gather_s
    while True:
        try:
            return await _LeaderLink.connect(hosts)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline_s:
                raise CommunicationError(
                    f"host 0 did not answer at {hosts.meeting} within "
                    f"{hosts.gather_s:g} s: {error}"
                ) from error
        await asyncio.sleep(RETRY_S)


@final
class _LeaderLink:
    """The connection to the first host's launcher."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        codec: FrameCodec,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._codec = codec

    @staticmethod
    async def connect(hosts: HostsConfig) -> _LeaderLink:
        """Connects, and reads its greeting.

        Raises:
            OSError: nothing listens there.
        """
        opening = asyncio.open_connection(*hosts.rendezvous)
        reader, writer = await asyncio.wait_for(opening, LAST_WORD_S)
        outlive_cuts(writer.get_extra_info("socket"))
        reading = reader.readexactly(GREETING_BYTES)
        try:
            greeting = await asyncio.wait_for(reading, LAST_WORD_S)
            codec = FrameCodec(hosts.key, nonce_of(greeting), is_server=False)
        except BaseException:
            writer.close()
            raise
        return _LeaderLink(reader, writer, codec)

    def send(self, message: FromHost) -> None:
        """Sends a message, if the connection is there."""
        if not self._writer.is_closing():
            self._writer.write(self._codec.encode(to_wire(message)))

    async def receive(self) -> list[Any]:
        """Messages that have come; none: the connection has ended."""
        while True:
            try:
                data = await self._reader.read(_CHUNK_BYTES)
            except OSError:
                return []
            found = [from_wire(m, FROM_LEADER) for m in self._codec.feed(data)]
            if found or not data:
                return found

    def close(self) -> None:
        """Ends the connection."""
        self._writer.close()

    def abort(self) -> None:
        """Ends it, with what is not sent."""
        self._writer.transport.abort()


@final
class _Follower:
    """This host's ranks in a run that another host leads."""

    def __init__(
        self, config: LaunchConfig, hosts: HostsConfig, link: _LeaderLink
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._link = link
        self._ranks = range(0)
        self._processes: dict[int, RankProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._pipe = os.pipe()  # this process alone has the end that it writes to
        self._output = RankOutput(config.on_line, config.display, lambda: True)
        self._signal: signal.Signals | None = None
        self._heard_s = time.monotonic()
        self._is_silent = self._is_cut_off = False
        self._is_needed = True

    async def run(self) -> FollowResult:
        """From this host's coming to the run's end."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._interrupt, number)
        self._link.send(self._hosts.joins(self._config.world_size))
        receiving = asyncio.ensure_future(self._receive())
        listening = asyncio.ensure_future(self._watch_silence())
        try:
            result = await receiving
        finally:
            listening.cancel()
        ends_by_itself = result is None and not self._is_cut_off
        await self._end_ranks(GRACE_S if ends_by_itself else 0.0)
        await self._output.finish()
        if result is None:
            result = self._lost()
        return result

    async def close(self) -> None:
        """Kills what still runs, and closes what is open."""
        self._signal_all(signal.SIGKILL)
        if self._watchers:
            await asyncio.wait(self._watchers)
        self._output.close()
        self._link.close()
        for descriptor in self._pipe:
            os.close(descriptor)

    def _lost(self) -> FollowResult:
        if not self._processes:
            raise CommunicationError(
                f"host 0 at {self._hosts.meeting} did not take this host: it has "
                "ended, has another --key-file, or its run has begun without this host"
            )
        where = f"host 0 at {self._hosts.meeting}"
        if self._is_cut_off:
            reason = (
                f"{where} has been silent for {CUT_OFF_S:g} s, and the others go on"
            )
            return FollowResult(1, f"{reason}: it is stopped, or the link to it is cut")
        codes = (p.returncode or 0 for p in self._processes.values())
        code = next((128 - c if c < 0 else c for c in codes if c), 1)
        return FollowResult(
            code, f"lost {where}: its launcher has ended, or the link to it is cut"
        )

    async def _receive(self) -> FollowResult | None:
        """Does as the first host's launcher says until the run ends.

        Returns:
            How it ended; None: that launcher is gone.
        """
        deadline_s = time.monotonic() + self._hosts.gather_s + LAST_WORD_S
        while True:
            try:
                messages = await asyncio.wait_for(self._link.receive(), LAST_WORD_S)
            except asyncio.TimeoutError:
                if self._watchers:
                    is_over = all(watcher.done() for watcher in self._watchers)
                else:
                    is_over = time.monotonic() > deadline_s
                if is_over:
                    return None
                continue
            except ProtocolError:
                return None
            if not messages:
                return None
            self._heard()
            for message in messages:
                if isinstance(message, RunEnded):
                    return FollowResult(message.code, message.reason)
                if isinstance(message, HostRefused) and self._signal is not None:
                    return FollowResult(128 + self._signal, message.reason)
                await self._take(message)

    async def _take(self, message: Any) -> None:
        if isinstance(message, HostRefused):
            raise ConfigError(message.reason)
        if isinstance(message, HostWelcome):
            await self._start(message)
        elif isinstance(message, SignalRank) and message.rank in self._processes:
            number = signal.Signals(message.number)
            send_signal(self._processes[message.rank], number)
        elif isinstance(message, HostBeat):
            self._is_needed = message.is_needed

    async def _start(self, welcome: HostWelcome) -> None:
        config, hosts = self._config, self._hosts
        ranks = range(welcome.first, welcome.first + config.world_size)
        world_size = welcome.world_size
        environments = rank_environments(
            world_size, hosts.rendezvous, hosts.key, ranks, hosts.node_rank
        )
        # Of elche alone: another host says how the run is, not what starts here.
        told = {n: v for n, v in welcome.environment if n.startswith("ELCHE_")}
        told |= {"ELCHE_LISTEN": hosts.own_address(), PIPE: str(self._pipe[0])}
        for place, rank in enumerate(ranks):
            environment = rank_environment(config, place, environments[place] | told)
            process = await start_rank(
                config, place, environment, self._pipe[0], self._output, place
            )
            self._processes[rank] = process
            watching = self._watch(rank, process)
            self._watchers.append(asyncio.ensure_future(watching))

    async def _watch(self, rank: int, process: RankProcess) -> None:
        code = await process.wait()
        self._link.send(RankEnded(rank=rank, code=code))

    def _interrupt(self, number: signal.Signals) -> None:
        """This launcher was sent a signal: this host leaves, or all ranks are told.

        The second one kills this host's, as does the first where nothing comes of it.
        """
        if self._signal is not None:
            self._signal_all(signal.SIGKILL)
            self._link.close()
            return
        self._signal = number
        self._link.send(HostInterrupted(number=int(number)))
        loop, end_s = asyncio.get_running_loop(), OWN_END_S + KILL_AFTER_S
        loop.call_later(end_s, self._signal_all, signal.SIGKILL)

    async def _end_ranks(self, grace_s: float) -> None:
        """Waits for the ranks a while; terminates, and then kills, who stays."""
        for patience_s, number in ((grace_s, signal.SIGTERM), (KILL_AFTER_S, None)):
            running = [watcher for watcher in self._watchers if not watcher.done()]
            if running:
                await asyncio.wait(running, timeout=patience_s)
            if number is not None:
                self._signal_all(number)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            send_signal(process, number)

    def _heard(self) -> None:
        now_s = time.monotonic()
        if self._is_silent:
            self._is_silent = False
            silent_s = now_s - self._heard_s
            logger.warning("host 0 is heard again, after %.0f s", silent_s)
        self._heard_s = now_s

    async def _watch_silence(self) -> None:
        """Says that the first host is silent; ends this one where the others go on."""
        while True:
            await asyncio.sleep(BEAT_S)
            silent_s = time.monotonic() - self._heard_s
            if not self._is_needed and silent_s >= CUT_OFF_S:
                self._is_cut_off = True
                self._link.abort()
                return
            if self._processes and silent_s >= SILENT_S and not self._is_silent:
                self._is_silent = True
                logger.warning(
                    "host 0 at %s has been silent for %.0f s, and training waits: it "
                    "is stopped, or the link to it is cut",
                    *(self._hosts.meeting, silent_s),
                )
