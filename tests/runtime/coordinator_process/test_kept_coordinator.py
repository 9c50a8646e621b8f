"""A launcher's coordinator that is killed, and ranks that go on with the next one."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from elche.comm.control.addresses import listen
from elche.comm.control.control_channel import ControlChannel
from elche.coordination.journal import Entry
from elche.coordination.protocol.events import BarrierReached, Left, RankLost, Tick
from elche.coordination.protocol.instructions import BarrierPassed, Regroup, Welcome
from elche.coordination.protocol.outbox import ACK_EVERY
from elche.errors import CommunicationError
from elche.runtime.coordinator_process import kept_coordinator
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.coordinator_process.link import (
    Begin,
    Copy,
    Fence,
    Journal,
    Link,
    pack,
)
from elche.runtime.coordinator_process.serving import COPY_ENTRIES, CoordinatorChild
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.rank import join_of
from tests.harness.waiting import until

WAIT_S = 150.0
PAIR = Cluster(
    run=SimulatedRun(samples=160, batch_size=8, policy="sync"),
    devices=(Device(seconds_per_sample=0.01, count=2),),
)


class Launcher:
    """What a launcher does for its coordinator, in a thread of this process."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.kept = self.call(self._start())
        self.kills = 0

    async def _start(self) -> KeptCoordinator:
        kept = KeptCoordinator(2, self.key, listen("127.0.0.1", 0), survives=True)
        kept.start()
        return kept

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(WAIT_S)

    def kill(self, kept: KeptCoordinator | None = None) -> None:
        """Kills the coordinator that runs now, or the next that does."""
        kept = kept or self.kept
        until(lambda: kept.pid is not None)
        pid = kept.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        until(lambda: kept.pid != pid)

    def channel(self, rank: int) -> ControlChannel:
        address, key = self.kept.address, self.key
        return ControlChannel.connect(address, key, rank, WAIT_S, resumes=True)


@contextmanager
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    try:
        yield one
    finally:
        one.call(one.kept.stop())
        one.loop.call_soon_threadsafe(one.loop.stop)
        one.thread.join(WAIT_S)
        one.loop.close()


def live(
    run: Launcher, rank: int, rounds: int, at: Callable[[int, int], None]
) -> list[str]:
    """A rank that meets the other one again and again; which barriers it passed."""
    passed = []
    with closing(run.channel(rank)) as channel:
        channel.send(join_of(PAIR, rank, PAIR.devices[0]))
        assert isinstance(channel.receive(WAIT_S, "welcome"), Welcome)
        for number in range(rounds):
            at(rank, number)
            channel.store_set(f"{rank}/{number}", bytes([number % 256]))
            channel.send(BarrierReached(rank=rank, name=str(number)))
            told = channel.receive(WAIT_S, "barrier")
            assert isinstance(told, BarrierPassed)
            passed.append(told.name)
            value = channel.store_get(f"{1 - rank}/{number}", WAIT_S)
            assert value == bytes([number % 256])
        channel.send(Left(rank=rank))
    return passed


def both(run: Launcher, rounds: int, at: Callable[[int, int], None]) -> list[list[str]]:
    with ThreadPoolExecutor(2) as ranks:
        ended = [ranks.submit(live, run, rank, rounds, at) for rank in range(2)]
        return [each.result(WAIT_S) for each in ended]


def test_ranks_go_on_with_the_next_one_where_they_stand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each message is taken once, whether it was lost with the last one or not."""
    moments = {(0, 0), (1, 70), (0, 71), (0, 150)}

    def at(rank: int, number: int) -> None:
        if (rank, number) in moments:
            run.kill()

    with launcher() as run:
        told = both(run, 200, at)
        until(lambda: run.kept.status.is_finished)
        assert run.kills == 4
        assert caplog.text.count("a new one continues the run") == 4
        story = run.call(run.kept.stop(wants_story=True))
    assert told == [[str(number) for number in range(200)]] * 2
    assert sum("<- BarrierReached" in line for line in story) == 400
    assert sum("-> BarrierPassed" in line for line in story) == 400


def test_a_rank_that_dies_meanwhile_is_fenced_by_the_launcher_and_lost() -> None:
    fenced: list[int] = []
    with launcher() as run:
        run.kept.on_lost = AsyncMock(side_effect=fenced.append)
        with closing(run.channel(0)) as first, closing(run.channel(1)) as second:
            for rank, channel in enumerate((first, second)):
                channel.send(join_of(PAIR, rank, PAIR.devices[0]))
            for channel in (first, second):
                assert isinstance(channel.receive(WAIT_S, "welcome"), Welcome)
            run.kill()
            run.call(run.kept.rank_ended(1, -signal.SIGKILL))
            told = first.receive(WAIT_S, "what comes of it")
    assert not isinstance(told, Regroup)  # no epoch has begun: it ends the run
    assert not fenced
    assert run.kept.aborted is not None
    assert "rank 1 is gone" in run.kept.aborted


def test_one_that_dies_again_and_again_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with launcher() as run:
        channel = run.channel(0)
        channel.send(join_of(PAIR, 0, PAIR.devices[0]))
        for _ in range(kept_coordinator.MOST_DEATHS):
            run.kill()
        with pytest.raises(CommunicationError, match="rank 0 lost the coordinator"):
            channel.receive(WAIT_S, "welcome")
        channel.close()
        assert "10 times in a row" in (run.kept.aborted or "")
    assert "the run ends" in caplog.text


BEGIN = Begin(
    world_size=2, key=b"k" * 32, survives=True, shows=False, copy=None, journal=()
)


def test_two_words_of_one_death_hold_nobody_up() -> None:
    """The second comes while the coordinator waits for the launcher to fence."""
    ours, theirs = socket.socketpair()

    async def read_twice() -> list[object]:
        child = CoordinatorChild(Link(theirs), BEGIN)
        ours.sendall(pack(RankLost(rank=0)) + pack(Fence(1)))
        child._have_fenced(1)  # reads what the loop has seen to be there
        child._receive()
        return [*child._pending]

    with ours, theirs:
        assert asyncio.run(read_twice()) == [RankLost(rank=0)]


def written(begin: Begin, ticks: int) -> list[object]:
    """What the launcher gets of a coordinator that begins so, after so many ticks."""
    ours, theirs = socket.socketpair()

    async def run() -> list[object]:
        child = CoordinatorChild(Link(theirs), begin)
        for _ in range(ticks):
            child._server.take(Tick())
        return Link(ours).receive()

    with ours, theirs:
        return asyncio.run(run())


def test_a_copy_is_made_however_soon_they_die() -> None:
    """Of what each one has been handed at its beginning, too."""
    tick = pickle.dumps([Entry(None, Tick(), 1.0)])
    begin = replace(BEGIN, journal=(tick,) * COPY_ENTRIES)
    assert len([m for m in written(begin, 1) if isinstance(m, Copy)]) == 1


def test_recorded_messages_travel_in_their_piece_of_the_journal() -> None:
    """One frame: a coordinator that is killed leaves both behind, or neither."""
    left = pickle.dumps([Entry(None, Left(rank=0), 1.0)])
    begin = replace(BEGIN, shows=True, journal=(left,))
    pieces = [m for m in written(begin, 2) if isinstance(m, Journal)]
    assert [piece.messages for piece in pieces] == [(Tick(),)] * 2


def test_neither_side_keeps_what_the_other_has_taken() -> None:
    """However messages are put together: two at once, after a first one."""
    with launcher() as run:
        with closing(run.channel(0)) as channel:
            channel.store_set("first", b"")
            for number in range(300):
                events = [BarrierReached(rank=0, name=f"{number}/{i}") for i in (0, 1)]
                channel.send(*events)
            channel.store_get("first", WAIT_S)
            channel.store_set("last", b"")
            channel.store_get("last", WAIT_S)
            assert len(channel._outbox.rest()) < 2 * ACK_EVERY
            channel.store_set("one more", b"")
        assert not channel._outbox  # which asks for the rest at its end


@pytest.mark.parametrize("is_of_ranks", [False, True])
def test_only_what_ranks_sent_counts_as_progress(is_of_ranks: bool) -> None:
    """Else one that dies of its journal would be started for ever."""
    with listen("127.0.0.1", 0) as listener:
        kept = KeptCoordinator(2, b"k" * 32, listener, survives=True)
        kept._barren = 3
        kept._handle(Journal(b"", 0, is_of_ranks))
    assert kept._barren == (0 if is_of_ranks else 3)
