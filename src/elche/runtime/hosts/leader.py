"""The first host's launcher, which leads the others'.

Processes on other hosts are handed to `RankProcesses` like those of this one. The
other hosts' launchers come to the port to which all ranks come afterwards.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, final

from elche.comm.control.addresses import format_address
from elche.coordination.hosts import host_refusal, ranks_by_host
from elche.coordination.liveness import BEAT_S
from elche.coordination.protocol.events import Failed
from elche.coordination.protocol.host_messages import (
    HostBeat,
    HostInterrupted,
    HostJoins,
    HostRefused,
    HostWelcome,
    RankEnded,
    RunEnded,
)
from elche.errors import CommunicationError, ConfigError, ElcheError, ProtocolError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.host_link import ANSWER_S, KILLED, HostLink, RemoteProcess
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.remote_start import DEFAULT_SSH, RemoteLaunchers
from elche.runtime.process.rank_processes import RankProcess, RankProcesses


@final
class Leader:
    """The other hosts of a run, on the first one.

    Args:
        config: this launcher's place.
        own_ranks: how many ranks it starts itself.

    Attributes:
        listener: where the hosts have come, for the run's coordinator.
    """

    def __init__(self, config: HostsConfig, own_ranks: int) -> None:
        self._config = config
        self._first = config.joins(own_ranks)
        self._links: dict[int, HostLink] = {}
        self._processes: dict[int, RemoteProcess] = {}
        self._ranks: dict[int, range] = {}
        self._is_complete: asyncio.Future[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._is_over = False
        self._remote: RemoteLaunchers | None = None
        self.listener: socket.socket | None = None
        self._on_interrupt: Callable[[signal.Signals, str], None] = _ignore
        self._on_lost: Callable[[int, str], None] = _ignore

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
        self._on_interrupt = processes.interrupt
        self._on_lost = lambda rank, why: server.take(
            Failed(rank=rank, error=why, traceback="")
        )

    async def gather(self) -> None:
        """Waits for all hosts.

        Raises:
            CommunicationError: one did not come in time, or was interrupted.
            ConfigError: they do not fit together.
        """
        config, loop = self._config, asyncio.get_running_loop()
        self._is_complete = loop.create_future()
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
            await self._refuse(reason)
            raise CommunicationError(reason) from None
        except (ElcheError, asyncio.CancelledError) as error:
            await self._refuse(str(error) or "interrupted on host 0")
            raise
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            gathering.close()
        hosts = [link.host for link in self._links.values() if link.host is not None]
        self._ranks = ranks_by_host([self._first, *hosts])
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
                    first=ranks.start,
                    world_size=self.world_size,
                    environment=tuple(environment.items()),
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

    def interrupted(self, link: HostLink, message: HostInterrupted) -> None:
        """Another host's launcher was sent a signal."""
        if message.number not in (signal.SIGINT, signal.SIGTERM):
            raise ProtocolError(f"{link.host} speaks of signal {message.number}")
        name = signal.Signals(message.number).name
        where = f" on {link.host}"
        self._fail(CommunicationError(f"interrupted: {name}{where}"))
        self._on_interrupt(signal.Signals(message.number), where)

    def lost(self, link: HostLink) -> None:
        """A launcher's connection has ended."""
        host = link.host
        if host is None or self._is_over:
            return
        if self._is_gathering:  # it may come again
            self._links.pop(host.node_rank, None)
        running = {r: p for r, p in self._of(link).items() if p.returncode is None}
        if running:
            reason = (
                f"the launcher of {host} has ended or was killed, or its link is cut"
            )
            self._on_lost(min(running), reason)
        for process in running.values():
            process.end(KILLED)

    async def end(self, code: int, reason: str) -> None:
        """The run is over; waits a moment until the other launchers know."""
        self._is_over = True
        if self._beating is not None:
            self._beating.cancel()
        for link in self._links.values():
            link.send(RunEnded(code=code, reason=reason))
        closed = [asyncio.ensure_future(x.closed.wait()) for x in self._links.values()]
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
        ranks = self._ranks.get(link.host.node_rank, range(0))
        return {r: self._processes[r] for r in ranks if r in self._processes}

    async def _refuse(self, reason: str) -> None:
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
                link.send(HostBeat())


def _say(line: str) -> None:
    print(f"elche run: {line}", file=sys.stderr, flush=True)


def _ignore(*about: Any) -> None:
    """Until the run has begun."""
