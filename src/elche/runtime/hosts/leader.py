"""The first host's launcher, which leads the others'.

Processes on other hosts are handed to `RankProcesses` like those of this one. The
other hosts' launchers come to the port to which all ranks come afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import final

from elche.comm.control.addresses import format_address
from elche.comm.control.drop_log import DropLog
from elche.coordination.hosts import host_refusal, ranks_by_host
from elche.coordination.liveness import BEAT_S, SILENT_S
from elche.coordination.protocol.events import HostLeaves, HostLost
from elche.coordination.protocol.host_messages import (
    HostBeat,
    HostComes,
    HostInterrupted,
    HostJoins,
    HostKept,
    HostRefused,
    HostTook,
    HostWelcome,
    RankEnded,
    RunEnded,
    VoteAsked,
)
from elche.errors import CommunicationError, ConfigError, ElcheError, ProtocolError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.host_link import ANSWER_S, KILLED, HostLink, RemoteProcess
from elche.runtime.hosts.host_views import SILENT_BEATS, HostViews
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.remote_start import DEFAULT_SSH, RemoteLaunchers
from elche.runtime.hosts.witness import ask_witness
from elche.runtime.process.rank_processes import (
    GRACE_S,
    RankProcess,
    RankProcesses,
    send_signal,
)


@final
class Leader:
    """The other hosts of a run, on the first one.

    Args:
        config: this launcher's place.
        own_ranks: how many ranks it starts itself.

    Attributes:
        listener: where the hosts have come, for the run's coordinator.
        drops: see `LinkOwner`.
    """

    def __init__(self, config: HostsConfig, own_ranks: int) -> None:
        self._config = config
        self._first = config.joins(own_ranks)
        self._links: dict[int, HostLink] = {}
        self._processes: dict[int, RemoteProcess] = {}
        self._ranks: Mapping[int, Sequence[int]] = {}
        self._is_complete: asyncio.Future[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._is_over = False
        self._remote: RemoteLaunchers | None = None
        self.listener: socket.socket | None = None
        self._leaving: dict[HostLink, signal.Signals] = {}
        self._server: KeptCoordinator | None = None
        self._run_processes: RankProcesses | None = None
        self._views: HostViews | None = None
        self._awaited: Mapping[int, HostJoins] = {}
        self._run = ""
        self._arrived = asyncio.Event()
        self._quiet: dict[HostLink, int] = {}  # beats since it was last heard
        self.drops = DropLog()

    @property
    def address(self) -> str:
        """Where others reach this host's ranks."""
        return self._first.address

    @property
    def key(self) -> bytes:
        """The run's secret."""
        return self._config.key

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(map(len, self._ranks.values()))

    def attach(self, server: KeptCoordinator, processes: RankProcesses) -> None:
        """Has the run's coordinator and its processes hear of the other hosts."""
        server.places = {
            rank: f" on {link.host}"
            for node_rank, link in self._links.items()
            for rank in self._ranks[node_rank]
        }
        self._server, self._run_processes = server, processes
        if self._views is not None:
            self._views.attach(server, processes.give_up, _say)

    async def gather(self) -> None:
        """Waits for all hosts.

        Raises:
            CommunicationError: one did not come in time, or was interrupted.
            ConfigError: they do not fit together.
        """
        config, loop = self._config, asyncio.get_running_loop()
        self._is_complete = loop.create_future()
        if config.witness is not None:  # it is there
            question = VoteAsked(run="", node_rank=0, view=0)
            await ask_witness(config.witness, config.key, question)
        self.listener = config.listener()
        gathering = await loop.create_server(
            lambda: HostLink(self, config.key), sock=self.listener.dup()
        )
        host, port = config.rendezvous[0], self.listener.getsockname()[1]
        interrupted = CommunicationError("interrupted: SIGTERM on host 0")
        loop.add_signal_handler(signal.SIGTERM, self._fail, interrupted)
        try:
            await self._invite(format_address(host, port))
            await asyncio.wait_for(self._is_complete, config.gather_s)
        except asyncio.TimeoutError:
            missing = sorted({*range(1, config.nnodes)} - self._links.keys())
            reason = (
                f"hosts {missing} did not come to {config.meeting} within "
                f"{config.gather_s:g} s"
            )
            await self.refuse(reason)
            raise CommunicationError(reason) from None
        except (ElcheError, asyncio.CancelledError) as error:
            await self.refuse(str(error) or "interrupted on host 0")
            raise
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            gathering.close()
        hosts = [link.host for link in self._links.values() if link.host is not None]
        self._ranks = ranks_by_host([self._first, *hosts])
        if config.may_be_succeeded:
            self._views = HostViews(config, self._links, self._ranks)
        self._beating = loop.create_task(self._beat())

    async def _invite(self, meeting: str) -> None:
        """Starts the other hosts' launchers, or says how they are started."""
        config = self._config
        if config.remote is not None:
            self._remote = RemoteLaunchers(config.remote, self._launcher_ended)
            await self._remote.begin(meeting, config.key)
            return
        _say(
            f"waiting for {config.nnodes - 1} other hosts; on each: elche run --nnodes "
            f"{config.nnodes} --node-rank 1 (2, ...) --rendezvous {meeting} --key-file "
            "FILE and the script"
        )

    def _launcher_ended(self, host: str, code: int) -> None:
        self._fail(
            CommunicationError(
                f"what starts the launcher on {host} ended with code {code} before "
                "that came; try the command by hand (ELCHE_SSH, default: "
                f"{DEFAULT_SSH})"
            )
        )

    def take_host(self, host: HostJoins, link: HostLink) -> None:
        """A launcher presents itself."""
        known = [each.host for each in self._links.values() if each.host is not None]
        if reason := host_refusal(host, [self._first, *known]):
            link.send(HostRefused(reason=reason))
            link.close()
            self._fail(ConfigError(reason))
            return
        link.host = host
        self._links[host.node_rank] = link
        _say(f"{host} is here, with {host.ranks} ranks")
        if len(self._links) == self._config.nnodes - 1 and self._is_gathering:
            assert self._is_complete is not None
            self._is_complete.set_result(None)

    @property
    def _is_gathering(self) -> bool:
        return self._is_complete is not None and not self._is_complete.done()

    def _fail(self, error: ElcheError) -> None:
        if self._is_gathering:
            assert self._is_complete is not None
            self._is_complete.set_exception(error)

    def start(self, environment: Mapping[str, str]) -> list[RankProcess]:
        """Has the other hosts' ranks started.

        Args:
            environment: variables that all ranks get.

        Returns:
            Their processes, in the order of ranks.
        """
        for node_rank, link in sorted(self._links.items()):
            ranks = self._ranks[node_rank]
            self._processes.update({rank: RemoteProcess(link, rank) for rank in ranks})
            link.send(
                HostWelcome(
                    first=ranks[0],
                    world_size=self.world_size,
                    environment=tuple(environment.items()),
                    run="" if self._views is None else self._views.run,
                )
            )
            if link.closed.is_set():  # since it has come
                self.lost(link)
        return [*self._processes.values()]

    def rank_ended(self, link: HostLink, message: RankEnded) -> None:
        """A rank's process on another host has ended."""
        process = self._of(link).get(message.rank)
        if process is None:
            raise ProtocolError(f"{link.host} speaks for rank {message.rank}")
        process.end(message.code)
        if self._views is not None and not self._running(link):
            self._views.end(_number_of(link))
        self._end_if_left(link)

    def took(self, link: HostLink, message: HostTook) -> None:
        """Another host lives, and has so much of the journal."""
        if self._views is not None:
            self._views.take(_number_of(link), message)
        self._quiet[link] = 0

    def interrupted(self, link: HostLink, message: HostInterrupted) -> None:
        """Another host's launcher was sent a signal."""
        if message.number not in (signal.SIGINT, signal.SIGTERM):
            raise ProtocolError(f"{link.host} speaks of signal {message.number}")
        number, where = signal.Signals(message.number), f" on {link.host}"
        self._fail(CommunicationError(f"interrupted: {number.name}{where}"))
        if self._run_processes is None:
            return
        if self._may_leave(link):
            self._let_leave(link, number)
        else:
            self._run_processes.interrupt(number, where)

    def _may_leave(self, link: HostLink) -> bool:
        """Whether the run goes on without a host."""
        is_ending = (
            self._run_processes is None or self._run_processes.signal is not None
        )
        return not (is_ending or self._is_needed(link))

    def _is_needed(self, link: HostLink) -> bool:
        """Whether the run would end without a host."""
        if self._server is None or self._server.aborted is not None:
            return True
        return not self._server.outlives(*self._running(link))

    def _let_leave(self, link: HostLink, number: signal.Signals) -> None:
        """Has the ranks of a host leave the run; who stays is killed, and outlived."""
        assert self._server is not None
        _say(f"{link.host} leaves the run: its launcher was sent {number.name}")
        self._leaving[link] = number
        by = f"{number.name} on {link.host}"
        self._server.take(HostLeaves(ranks=tuple(self._running(link)), by=by))
        asyncio.get_running_loop().call_later(GRACE_S, self._end_late, link)
        self._end_if_left(link)

    def _end_late(self, link: HostLink) -> None:
        """Ends who has not left, unless all end now, perhaps with a checkpoint."""
        late = self._running(link).values() if self._may_leave(link) else ()
        for process in late:
            send_signal(process, signal.SIGKILL)

    def _end_if_left(self, link: HostLink) -> None:
        """A host that leaves is through when its ranks have ended."""
        number = self._leaving.get(link)
        if number is not None and not self._running(link) and self._may_leave(link):
            reason = f"this host was sent {number.name} and has left the run"
            link.send(RunEnded(code=128 + number, reason=reason))

    def lost(self, link: HostLink) -> None:
        """A launcher's connection has ended."""
        host = link.host
        if host is None or self._is_over:
            return
        if self._is_gathering:  # it may come again
            self._links.pop(host.node_rank, None)
        running = self._running(link)
        if self._views is not None:
            self._views.lose(host.node_rank)
        for process in running.values():
            process.end(KILLED)
        if running and self._server is not None:
            why = f"the launcher of {host} has ended or was killed, or its link is cut"
            self._server.take(HostLost(ranks=tuple(running), why=why))

    async def end(self, code: int, reason: str) -> None:
        """The run is over; waits a moment until the other launchers know."""
        self._is_over = True
        if self._beating is not None:
            self._beating.cancel()
        for link in self._links.values():
            link.send(RunEnded(code=code, reason=reason))
        closed = [asyncio.ensure_future(x.closed.wait()) for x in self._links.values()]
        if closed:
            _, waiting = await asyncio.wait(closed, timeout=ANSWER_S)
            for task in waiting:
                task.cancel()
        for link in self._links.values():
            link.close()
        if self._remote is not None:
            await self._remote.end()

    def _of(self, link: HostLink) -> dict[int, RemoteProcess]:
        """Processes of a host."""
        assert link.host is not None
        ranks = self._ranks.get(link.host.node_rank, ())
        return {r: self._processes[r] for r in ranks if r in self._processes}

    def _running(self, link: HostLink) -> dict[int, RemoteProcess]:
        return {r: p for r, p in self._of(link).items() if p.returncode is None}

    async def refuse(self, reason: str) -> None:
        """Ends all launchers that are here, before the run has begun."""
        self._is_over = True
        for link in self._links.values():
            link.send(HostRefused(reason=reason))
            link.close()
        if self.listener is not None:
            self.listener.close()
        if self._remote is not None:
            await self._remote.end()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for link in self._links.values():
                link.send(HostBeat(is_needed=self._is_needed(link)))
            if self._views is not None:
                self._views.beat()
            elif self._run:
                self._end_silent()

    def _end_silent(self) -> None:
        """Ends links of silent hosts without which the run goes on that this one leads.

        From when they have come: their ranks may be in a long step, and not here yet.
        """
        for link in self._links.values():
            quiet = self._quiet[link] = self._quiet.get(link, 0) + 1
            is_here = not link.closed.is_set()
            if quiet >= SILENT_BEATS and is_here and not self._is_needed(link):
                _say(f"{link.host} has been silent for {SILENT_S:g} s")
                link.abort()

    @property
    def links(self) -> Mapping[int, HostLink]:
        """Of the other hosts, by their node ranks."""
        return self._links

    def await_hosts(
        self,
        run: str,
        hosts: Mapping[int, HostJoins],
        ranks: Mapping[int, Sequence[int]],
    ) -> None:
        """The host that led is lost: takes in those that come to this one.

        Args:
            run: which they come for.
            hosts: that may come.
            ranks: of all hosts of the run.
        """
        self._run, self._awaited, self._ranks = run, hosts, ranks
        self._is_complete = asyncio.get_running_loop().create_future()

    async def arrival(self, timeout_s: float) -> None:
        """Waits a while until another one has come."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        self._arrived.clear()

    def host_comes(self, host: HostComes, link: HostLink) -> None:
        """A launcher comes whose leading host is lost."""
        number = host.node_rank
        is_due = self._is_gathering and number in self._awaited.keys() - self._links
        if not is_due or host.run != self._run:
            link.send(HostRefused(reason="the run goes on without this host"))
            link.close()
            return
        link.host = self._awaited[number]
        self._links[number] = link
        self._arrived.set()

    async def lead_on(
        self,
        server: KeptCoordinator,
        processes: RankProcesses,
        own: Mapping[int, RankProcess],
    ) -> None:
        """Goes on with the hosts that have come; the others are lost.

        Args:
            server: this host's coordinator, which stands by.
            processes: takes the ranks' processes.
            own: those of this host.
        """
        assert self._is_complete is not None
        self._is_complete.set_result(None)
        self._server, self._run_processes = server, processes
        places = {}
        for number, ranks in sorted(self._ranks.items()):
            link = self._links.get(number)
            for rank in ranks:
                process = own.get(rank)
                if process is None:
                    process = self._processes[rank] = RemoteProcess(link, rank)
                    if link is None:
                        process.end(KILLED)
                    places[rank] = f" on {self._awaited.get(number, 'host 0')}"
                processes.add(rank, process)
        _say(f"{self._first} leads the run now, with hosts {sorted(self._links)}")
        server.promote(places)
        for number, ranks in sorted(self._ranks.items()):
            if number not in (self._first.node_rank, *self._links):
                why = (
                    f"host {number} is lost: its launcher has ended, or its link is cut"
                )
                server.take(HostLost(ranks=tuple(ranks), why=why))
        await server.news(ANSWER_S)  # by which it is known what a signal leads to
        for link in self._links.values():
            link.send(HostKept(port=server.address[1]))
        self._beating = asyncio.get_running_loop().create_task(self._beat())


def _number_of(link: HostLink) -> int:
    assert link.host is not None
    return link.host.node_rank


def _say(line: str) -> None:
    print(f"elche run: {line}", file=sys.stderr, flush=True)
