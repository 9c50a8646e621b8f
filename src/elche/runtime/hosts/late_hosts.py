"""Launchers that join a run under way, on the host that has begun it.

Their ranks get numbers after all that there have been, and join as replacements of dead
ones do; their deaths are deaths like others. Nothing that becomes of such a host ends
the run, which is why its launcher is told by itself what has become of it:

    comes ──the run's first batches are done──▶ taken in ──the run ends──▶ told so
      │                                            │
      ├─ another version, another key         none of its ranks is in the run any more,
      ├─ the run takes in none: refused       or it was interrupted: told so, let go
      └─ interrupted: let go
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, final

from elche.comm.control.addresses import format_address
from elche.comm.control.drop_log import DropLog
from elche.coordination.hosts import host_refusal
from elche.coordination.liveness import BEAT_S
from elche.coordination.protocol.events import HostLeaves, HostLost
from elche.coordination.protocol.host_messages import (
    HostBeat,
    HostComes,
    HostInterrupted,
    HostJoins,
    HostRefused,
    HostTook,
    HostWelcome,
    RankEnded,
    RunEnded,
)
from elche.errors import ProtocolError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.host_link import ANSWER_S, KILLED, HostLink, RemoteProcess
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.process.rank_processes import GRACE_S, RankProcesses, send_signal

logger = logging.getLogger(__name__)

GONE: Final = "none of its ranks is in the run any more, which goes on without them"


class _Phase(Enum):
    """Of the run, as far as hosts may join it."""

    BEGINNING = "hosts wait"
    OPEN = "hosts are taken in"
    OVER = "hosts are refused"


@dataclass(slots=True)
class _LateHost:
    """A launcher that has come.

    Attributes:
        processes: of its ranks, by number; none before it is taken in.
        signal: that it was sent; 0: none.
    """

    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    signal: int = 0


@final
class LateHosts:
    """Takes other hosts' launchers into a run under way.

    Args:
        config: this launcher's place.
        own_ranks: how many ranks it starts itself.
        server: the run's coordinator, which numbers ranks.
        processes: takes those of the others.
        say: takes a line for the user.

    Attributes:
        drops: see `LinkOwner`.
    """

    def __init__(
        self,
        config: HostsConfig,
        own_ranks: int,
        server: KeptCoordinator,
        processes: RankProcesses,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._first = config.joins(own_ranks)
        self._server = server
        self._processes = processes
        self._tell = say
        self._environment: Mapping[str, str] = {}
        self._phase = _Phase.BEGINNING
        self._hosts: dict[HostLink, _LateHost] = {}
        self._count = 0
        self._listening: asyncio.Server | None = None
        self._beating: asyncio.Task[None] | None = None
        self.drops = DropLog()

    async def listen(self, environment: Mapping[str, str]) -> None:
        """Begins to listen, and says how others join.

        Args:
            environment: variables that all ranks get that join.

        Raises:
            CommunicationError: it cannot listen there.
        """
        self._environment = environment
        config, loop = self._config, asyncio.get_running_loop()
        listener = config.listener()
        self._listening = await loop.create_server(
            lambda: HostLink(self, config.key), sock=listener
        )
        self._beating = loop.create_task(self._beat())
        meeting = format_address(config.rendezvous[0], listener.getsockname()[1])
        self._say(f"other hosts join by: elche join {meeting} {config.invitation}")

    def begin(self) -> None:
        """The run's first batches are done: who has come is taken in."""
        if self._phase is not _Phase.BEGINNING:
            return
        self._phase = _Phase.OPEN
        if why := self._server.why_closed:
            self._say(f"no host can join this run: {why}")
        for link in list(self._hosts):
            self._take_in(link)

    def take_host(self, host: HostJoins, link: HostLink) -> None:
        """A launcher presents itself."""
        if reason := host_refusal(host, [self._first]):
            self._refuse(link, reason)
            return
        self._count += 1
        link.host = host = replace(host, node_rank=self._count)
        self._hosts[link] = _LateHost()
        if self._phase is _Phase.BEGINNING:
            self._say(f"{host} is here, and waits until the first epoch has begun")
        else:
            self._take_in(link)

    def host_comes(self, host: HostComes, link: HostLink) -> None:
        """A launcher of another run comes."""
        self._refuse(link, f"host {host.node_rank} has come for another run")

    def took(self, link: HostLink, message: HostTook) -> None:
        """Nothing is to be taken."""

    def _take_in(self, link: HostLink) -> None:
        host, server = link.host, self._server
        assert host is not None
        is_over = self._phase is _Phase.OVER
        if why := "that is over" if is_over else server.why_closed:
            del self._hosts[link]
            self._refuse(link, f"{host} cannot join the run under way: {why}")
            return
        ranks = [server.add_rank(f" on {host}") for _ in range(host.ranks)]
        self._say(f"{host} is here; its ranks {ranks} will join")
        for rank in ranks:
            process = RemoteProcess(link, rank)
            self._hosts[link].processes[rank] = process
            self._processes.add(rank, process)
        link.send(
            HostWelcome(
                first=ranks[0],
                world_size=self._first.ranks,
                environment=tuple(self._environment.items()),
            )
        )

    def _refuse(self, link: HostLink, reason: str) -> None:
        self._say(reason)
        link.send(HostRefused(reason=reason))
        link.close()

    def rank_ended(self, link: HostLink, message: RankEnded) -> None:
        """A rank's process on another host has ended."""
        host = self._hosts.get(link)
        if host is None:  # let go
            return
        if message.rank not in host.processes:
            raise ProtocolError(f"{link.host} speaks for rank {message.rank}")
        host.processes[message.rank].end(message.code)

    def interrupted(self, link: HostLink, message: HostInterrupted) -> None:
        """A launcher was sent a signal: its ranks end, and the others go on."""
        if message.number not in (signal.SIGINT, signal.SIGTERM):
            raise ProtocolError(f"{link.host} speaks of signal {message.number}")
        host = self._hosts.get(link)
        if host is None:
            return
        host.signal = message.number
        name = signal.Signals(message.number).name
        self._say(f"{link.host} was sent {name} and leaves")
        members = [r for r in self._running(link) if self._server.has_member(r)]
        self._kill(link, set(members))  # who has not joined yet loses nothing
        if members:
            leave = HostLeaves(ranks=tuple(members), by=f"{name} on {link.host}")
            self._server.take(leave)
        asyncio.get_running_loop().call_later(GRACE_S, self._kill, link)
        self._let_go_if_gone(link)

    def _running(self, link: HostLink) -> list[int]:
        host = self._hosts.get(link, _LateHost())
        return [r for r, p in host.processes.items() if p.returncode is None]

    def _kill(self, link: HostLink, spared: Set[int] = frozenset()) -> None:
        for rank in set(self._running(link)) - spared:
            send_signal(self._hosts[link].processes[rank], signal.SIGKILL)

    def lost(self, link: HostLink) -> None:
        """A launcher's connection has ended, and so have its ranks."""
        running = self._running(link)
        host = self._hosts.pop(link, None)
        if host is None or self._phase is _Phase.OVER:
            return
        for process in host.processes.values():
            process.end(KILLED)
        if running:
            gone = "has ended or was killed, or its link is cut"
            why = f"the launcher of {link.host} {gone}"
            logger.warning("%s: its ranks %s are gone", why, running)
            self._server.take(HostLost(ranks=tuple(running), why=why))

    def outlived(self, rank: int) -> None:
        """A rank has ended, and the run goes on without it."""
        for link, host in list(self._hosts.items()):
            if rank in host.processes:
                self._let_go_if_gone(link)

    def _let_go_if_gone(self, link: HostLink) -> None:
        """Tells a launcher so when no rank of its is in the run any more."""
        host, codes = self._hosts[link], list[int]()
        for rank, process in host.processes.items():
            if process.returncode is None or not self._server.is_outlived(rank):
                return
            codes.append(process.returncode)
        code = next((128 - c if c < 0 else c for c in codes if c), 1)
        reason = GONE
        unjoined = dict(self._server.status.unjoined)
        if why := [unjoined[rank] for rank in host.processes if rank in unjoined]:
            code, reason = 1, f"{why[0]}; {GONE}"  # whatever killed it meanwhile
        if host.signal:
            code = 128 + host.signal
            reason = f"it was sent {signal.Signals(host.signal).name}; the run goes on"
        del self._hosts[link]
        link.send(RunEnded(code=code, reason=reason))
        link.close()

    async def end(self, code: int, reason: str) -> None:
        """The run is over; waits a moment until the other launchers know."""
        self._phase = _Phase.OVER
        if self._beating is not None:
            self._beating.cancel()
        if self._listening is not None:
            self._listening.close()
        links = list(self._hosts)
        for link in links:
            link.send(RunEnded(code=code, reason=reason))
        closed = [asyncio.ensure_future(link.closed.wait()) for link in links]
        if closed:
            _, waiting = await asyncio.wait(closed, timeout=ANSWER_S)
            for each in waiting:
                each.cancel()
        for link in links:
            link.close()

    def _say(self, line: str) -> None:
        self._tell(f"elche run: {line}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for link in self._hosts:
                is_needed = not self._server.outlives(*self._running(link))
                link.send(HostBeat(is_needed=is_needed))
