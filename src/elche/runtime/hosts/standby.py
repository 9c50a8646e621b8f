"""The standby of a host: all it needs to lead the run if the leading host is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from elche.comm.control.addresses import parse_address, reserve
from elche.coordination.protocol.host_messages import (
    HostComes,
    HostJoins,
    HostKept,
    HostRefused,
    HostsChanged,
    HostTook,
    HostWelcome,
    JournalPiece,
    VoteAsked,
)
from elche.coordination.succession import has_majority
from elche.errors import CommunicationError, ConfigError, ProtocolError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.host_link import HostLink
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.launcher_link import CONNECT_S, LauncherLink
from elche.runtime.hosts.leader import Leader
from elche.runtime.hosts.witness import ask_witness
from elche.runtime.process.launch import LaunchResult
from elche.runtime.process.rank_processes import RankProcess, RankProcesses

logger = logging.getLogger(__name__)

COME_S: Final = 5.0
"""For others to come to the successor, once that has lost the leading host."""
TAKEN_S: Final = 20.0
"""For the successor to take this host, once this one has lost the leading host."""
RETRY_S: Final = 0.2


@final
class Standby:
    """A coordinator that stands where the leading host's does, and who is in the run.

    Args:
        config: this launcher's place.

    Raises:
        ConfigError: others are to reach it at what is no address of this host.

    Attributes:
        view: of the hosts, as the leading one has last said; None: it has not.
        run: the run's name, "" where no host succeeds another.
        why_not: why this host has no part in a run that goes on, if it has none.
        coordinator: of the successor, once that has taken this host.
    """

    def __init__(self, config: HostsConfig) -> None:
        self._config = config
        address = config.own_address()
        try:
            self._sockets = reserve(address), reserve(address)
        except OSError as error:
            raise ConfigError(
                f"expected --advertise or ELCHE_LISTEN to be an address of this host, "
                f"got {address}: {error.strerror or error}"
            ) from error
        self._server: KeptCoordinator | None = None
        self._pieces = 0
        self._world_size = 0
        self.view: HostsChanged | None = None
        self.run = self.why_not = ""
        self.coordinator = address, 0

    @property
    def ports(self) -> tuple[int, ...]:
        """For launchers, and for ranks, which come there only once this host leads."""
        return tuple(each.getsockname()[1] for each in self._sockets)

    def begin(self, welcome: HostWelcome) -> None:
        """The run begins: takes part in its journal, if another host may lead it."""
        if not welcome.run:
            return
        self.run, self._world_size = welcome.run, welcome.world_size
        self._server = KeptCoordinator(
            welcome.world_size,
            self._config.key,
            survives=True,
            several_hosts=True,
            listener=self._sockets[1],
            stands_by=True,
        )
        self._server.start()

    def take(self, message: Any) -> None:
        """The leading host says who is in the run, or what its coordinator took."""
        if isinstance(message, HostsChanged):
            if self.view is None or message.number >= self.view.number:
                self.view = message
        elif isinstance(message, JournalPiece) and self._server is not None:
            self._pieces = message.number
            self._server.follow(message.data, message.number, message.commands)

    @property
    def took(self) -> HostTook:
        """How far this host is."""
        view = 0 if self.view is None else self.view.number
        can_lead = self._server is not None and self._server.aborted is None
        return HostTook(view=view, pieces=self._pieces, can_lead=can_lead)

    @property
    def successor(self) -> int | None:
        """The host that goes on if the leading one is lost."""
        if self.view is None or self.view.successor < 0:
            return None
        return self.view.successor

    async def come(self) -> LauncherLink | None:
        """Comes to the successor, and waits until that leads.

        Returns:
            The link to it; None: see ``why_not``.
        """
        assert self.view is not None
        number = self.view.successor
        (place,) = (each for each in self.view.places if each[0] == number)
        name, address, port = place[1:4]
        self.why_not = (
            f"host {number} ({name}), which was to lead, has not taken this one"
        )
        deadline_s = time.monotonic() + TAKEN_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            where, key = (address, port), self._config.key
            try:
                link = await LauncherLink.connect(where, key, min(left_s, CONNECT_S))
            except (OSError, EOFError, asyncio.TimeoutError, ProtocolError):
                await asyncio.sleep(RETRY_S)  # it has not lost the leading host yet
                continue
            link.send(HostComes(run=self.run, node_rank=self._config.node_rank))
            try:
                messages = await asyncio.wait_for(link.receive(), left_s)
            except (asyncio.TimeoutError, ProtocolError):
                messages = []
            if messages and isinstance(messages[0], HostKept):
                self.coordinator = address, messages[0].port
                link.put_back(messages[1:])
                self.why_not = ""
                return link
            link.close()
            refused = [m.reason for m in messages if isinstance(m, HostRefused)]
            self.why_not = "; ".join([*refused, self.why_not])
            break
        return None

    async def lead(
        self,
        own: Mapping[int, RankProcess],
        on_lead: Callable[[tuple[str, int], RankProcesses], Awaitable[None]],
    ) -> LaunchResult | None:
        """Leads the run to its end, if this host may.

        Args:
            own: processes of this host's ranks.
            on_lead: called when it leads, with the coordinator's address and all ranks'
                processes; heeds signals until it returns.

        Returns:
            How the run has ended; None: see ``why_not``.
        """
        assert self._server is not None
        config, loop = self._config, asyncio.get_running_loop()
        leader = Leader(config, len(own))
        leader.await_hosts(self.run, *self._others(own))
        listening = await loop.create_server(
            lambda: HostLink(leader, config.key), sock=self._sockets[0]
        )
        server = self._server
        try:
            self.why_not = await self._too_few(leader)
            if not self.why_not and server.aborted is not None:
                self.why_not = f"it cannot lead: {server.aborted}"
            if self.why_not:
                await leader.refuse(self.why_not)
                return None
            processes = RankProcesses(server)
            await leader.lead_on(server, processes, own)
            try:
                await on_lead(server.address, processes)
                processes.handle_signals()
                await processes.wait()
            finally:
                await processes.close()
                await server.stop()
            result = LaunchResult(
                processes.exit_codes(),
                processes.interruption or server.aborted or "",
                processes.terminated,
                processes.failed_first(),
                processes.signal or 0,
            )
            await leader.end(result.exit_code, result.reason)
            return result
        finally:
            listening.close()

    def _others(
        self, own: Mapping[int, RankProcess]
    ) -> tuple[dict[int, HostJoins], dict[int, Sequence[int]]]:
        """The hosts that may come, and the ranks of each; 0 has those that are lost."""
        assert self.view is not None
        number = self._config.node_rank
        hosts = dict[int, HostJoins]()
        ranks: dict[int, Sequence[int]] = {number: sorted(own)}
        for node_rank, name, address, _, _, first, many in self.view.places:
            if node_rank != number:
                hosts[node_rank] = HostJoins(
                    node_rank=node_rank,
                    nnodes=self._config.nnodes,
                    ranks=many,
                    name=name,
                    address=address,
                    versions=(),
                )
                ranks[node_rank] = range(first, first + many)
        known = {rank for each in ranks.values() for rank in each}
        ranks[0] = sorted({*range(self._world_size)} - known)
        return hosts, ranks

    async def _too_few(self, leader: Leader) -> str:
        """Waits for the others, and counts them; in words if they do not suffice."""
        view, own = self.view, self._config.node_rank
        assert view is not None
        chain = [frozenset(hosts) for hosts in view.chain]
        deadline_s = time.monotonic() + COME_S
        while True:
            came = {own, *leader.links}
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or came >= chain[-1] - {0}:
                break
            await leader.arrival(left_s)
        has = partial(has_majority, chain, came, has_witness=bool(view.witness))
        if has(has_vote=False):
            return ""
        why = (
            f"only hosts {sorted(came)} are left here, not more than half of "
            f"{sorted(chain[-1])}"
        )
        if not view.witness or not has(has_vote=True):
            return why
        question = VoteAsked(run=self.run, node_rank=own, view=view.number)
        address = parse_address(view.witness, "the witness")
        try:
            is_given = await ask_witness(address, self._config.key, question)
        except CommunicationError as error:
            return str(error)
        no_vote = ", and the witness has no vote: it is for host 0"
        return "" if is_given else why + no_vote

    async def close(self) -> None:
        """Another host leads, or the run is over."""
        self.view = None
        if self._server is not None:
            await self._server.stop()
            self._server = None
        for each in self._sockets:
            each.close()
