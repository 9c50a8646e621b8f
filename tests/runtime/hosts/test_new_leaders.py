"""The first moments of a host that leads since host 0 is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from elche.comm.control.addresses import format_address, reserve
from elche.comm.control.key_file import KEY_BYTES
from elche.coordination.protocol.events import HostLeaves, HostLost
from elche.coordination.protocol.host_messages import (
    HostComes,
    HostInterrupted,
    HostKept,
    HostsChanged,
    HostTook,
    HostWelcome,
)
from elche.runtime.coordinator_process import kept_coordinator
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.coordinator_process.link import Status
from elche.runtime.hosts.host_link import HostLink, RemoteProcess
from elche.runtime.hosts.host_views import SILENT_BEATS
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.launcher_link import LauncherLink
from elche.runtime.hosts.leader import Leader
from elche.runtime.hosts.standby import Standby
from elche.runtime.hosts.witness import serve_witness
from elche.runtime.process.rank_processes import RankProcesses

WAIT_S = 100.0
RUN = "a run"
OUTLIVED = Status(members=frozenset({1, 2, 3}))


@dataclass
class Succession:
    """Host 1, to which hosts 2 and 3 have come; each has the rank of its number."""

    leader: Leader
    server: KeptCoordinator
    links: dict[int, LauncherLink]
    leading: asyncio.Task[None]

    def say(self, status: Status) -> None:
        """The coordinator says how the run is."""
        self.server._handle(status, None)  # type: ignore[arg-type]

    def lost(self) -> list[tuple[int, ...]]:
        """Ranks of hosts that the coordinator was told are lost."""
        told = self.server._commands.rest()
        return [each.ranks for each in told if isinstance(each, HostLost)]


@asynccontextmanager
async def succession() -> AsyncIterator[Succession]:
    """Until its coordinator has said how the run is it leads nobody."""
    key, loop = secrets.token_bytes(KEY_BYTES), asyncio.get_running_loop()
    config = HostsConfig(nnodes=4, node_rank=1, rendezvous=("127.0.0.1", 1), key=key)
    leader = Leader(replace(config, advertise="127.0.0.1"), 1)
    hosts = {n: replace(leader._first, node_rank=n) for n in (2, 3)}
    leader.await_hosts(RUN, hosts, {number: [number] for number in range(4)})
    listening = await loop.create_server(lambda: HostLink(leader, key), "127.0.0.1", 0)
    address = listening.sockets[0].getsockname()
    links = {n: await LauncherLink.connect(address, key) for n in hosts}
    for number, link in links.items():
        link.send(HostComes(run=RUN, node_rank=number))
    while len(leader.links) < len(hosts):
        await leader.arrival(WAIT_S)
    server = KeptCoordinator(4, key, survives=True, stands_by=True)
    processes, own = RankProcesses(server), RemoteProcess(None, 1)
    leading = loop.create_task(leader.lead_on(server, processes, {1: own}))
    made = Succession(leader, server, links, leading)
    while not made.lost():  # host 0's
        await asyncio.sleep(0)
    try:
        yield made
    finally:
        assert leader._beating is not None
        leader._beating.cancel()
        for process in (own, *leader._processes.values()):
            process.end(0)
        await processes.close()
        for link in links.values():
            link.close()
        listening.close()
        await server.stop()


def test_a_host_that_is_silent_since_it_came_is_lost() -> None:
    """As where a link is cut before the first beat; one in a long step beats."""

    async def silent() -> None:
        async with succession() as made:
            made.say(OUTLIVED)
            await made.leading
            leader, (second, third) = made.leader, made.leader.links.values()
            for beat in range(SILENT_BEATS):
                assert made.lost() == [(0,)], beat
                leader.took(third, HostTook(view=0, pieces=0))
                leader._end_silent()
            await second.closed.wait()
            assert made.lost() == [(0,), (2,)]
            leader._end_silent()  # once
            assert not third.closed.is_set()

    asyncio.run(asyncio.wait_for(silent(), WAIT_S))


def test_of_a_host_that_is_dropped_there_is_a_line_whatever_strangers_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def nonsense() -> None:
        async with succession() as made:
            made.leader.drops.count = 10
            made.links[2]._writer.write(bytes(64))
            await made.leader.links[2].closed.wait()
            made.say(OUTLIVED)
            await made.leading

    asyncio.run(asyncio.wait_for(nonsense(), WAIT_S))
    assert "dropped a launcher at " in caplog.text


def test_a_silent_host_without_which_the_run_ends_is_waited_for() -> None:
    async def silent() -> None:
        async with succession() as made:
            made.say(replace(OUTLIVED, mortal=frozenset({2})))
            await made.leading
            for _ in range(2 * SILENT_BEATS):
                made.leader.took(made.leader.links[3], HostTook(view=0, pieces=0))
                made.leader._end_silent()
            await asyncio.sleep(0)  # a link that was ended is seen to be
            assert made.lost() == [(0,)]

    asyncio.run(asyncio.wait_for(silent(), WAIT_S))


def test_a_host_that_is_interrupted_at_once_leaves() -> None:
    """It is told that it was taken when it is known what a signal leads to."""

    async def interrupted() -> None:
        async with succession() as made:
            assert not made.leading.done()
            made.say(OUTLIVED)
            (kept,) = await made.links[2].receive()
            assert isinstance(kept, HostKept)
            made.links[2].send(HostInterrupted(number=15))
            while not (told := made.server._commands.rest()[1:]):
                await asyncio.sleep(0)
            (leaves,) = told
            assert isinstance(leaves, HostLeaves)
            assert leaves.ranks == (2,)

    asyncio.run(asyncio.wait_for(interrupted(), WAIT_S))


def test_why_a_host_cannot_lead_that_has_the_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once: "the witness has no vote", which it had given."""
    monkeypatch.setattr(kept_coordinator, "MOST_DEATHS", 1)
    monkeypatch.setattr(kept_coordinator, "MODULE", "elche.no_such_module")

    async def refused() -> None:
        key, listener = secrets.token_bytes(KEY_BYTES), reserve("127.0.0.1")
        serving = asyncio.create_task(serve_witness(listener, key))
        config = HostsConfig(
            nnodes=2,
            node_rank=1,
            rendezvous=("127.0.0.1", 1),
            key=key,
            advertise="127.0.0.1",
        )
        standby = Standby(config)
        standby.begin(HostWelcome(first=1, world_size=2, environment=(), run=RUN))
        standby.take(
            HostsChanged(
                number=1,
                successor=1,
                chain=((0, 1),),
                places=((1, "b", "127.0.0.1", 1, 2, 1, 1),),
                witness=format_address(*listener.getsockname()),
            )
        )
        assert standby.took == HostTook(view=1, pieces=0)
        while standby.took.can_lead:
            await asyncio.sleep(0.01)
        assert await standby.lead({1: RemoteProcess(None, 1)}, _nobody_leads) is None
        assert standby.why_not.startswith("it cannot lead: the coordinator ended with")
        await standby.close()
        serving.cancel()

    asyncio.run(asyncio.wait_for(refused(), WAIT_S))


async def _nobody_leads(address: tuple[str, int], processes: RankProcesses) -> None:
    raise AssertionError("it led")


def test_ranks_are_waited_for_that_run_and_have_not_come() -> None:
    async def come() -> None:
        server = KeptCoordinator(3, b"k" * 32, survives=True)
        processes = RankProcesses(server)
        ranks = [RemoteProcess(None, rank) for rank in range(3)]
        for rank, process in enumerate(ranks):
            processes.add(rank, process)
        coming = asyncio.ensure_future(processes.come())
        for connected in ((), (0,), (0, 1)):
            server._handle(Status(connected=frozenset(connected)), None)  # type: ignore[arg-type]
            for _ in range(5):
                await asyncio.sleep(0)
            assert not coming.done()
        ranks[2].end(-9)
        server._handle(Status(connected=frozenset({0, 1})), None)  # type: ignore[arg-type]
        await coming
        for process in ranks:
            process.end(0)
        await processes.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(come(), WAIT_S))
