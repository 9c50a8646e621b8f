"""A coordinator that dies at any event, and the next one, made of its journal."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.journal import LAUNCHER, Entry, RunRecord
from elche.coordination.protocol.events import (
    BarrierReached,
    DefaultGroupFormed,
    Event,
    Failed,
    Join,
    JoinReady,
    RankLost,
    StoreSet,
    StreamBegun,
    Tick,
)
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.coordination.protocol.outbox import Outbox
from elche.coordination.state import Coordinator
from tests.coordination.sync.step_world import World, check
from tests.coordination.test_core import joined, reason_of
from tests.coordination.test_joining import FOUNDERS, Meeting, plan_of
from tests.harness.reached import reach
from tests.sim.checks import CHECKED, check_all
from tests.sim.strategies import clusters
from tests.sim.watched import WatchedSimulation


class DyingCore:
    """Stands in for the core of a simulation, and is another one after each death.

    Args:
        core: the first.
        world_size: ranks of the run.
        deaths: numbers of the events after which it dies.
        copy_every: entries after which a copy takes the place of the journal.
        acks_every: instructions after which a rank says how many it has.
    """

    def __init__(
        self,
        core: Coordinator,
        world_size: int,
        deaths: set[int],
        copy_every: int,
        acks_every: int,
    ) -> None:
        self._record = RunRecord(world_size, survives=False)
        self._record.core = core
        self._deaths, self._events = deaths, 0
        self._copy_every, self._acks_every = copy_every, acks_every
        self._told: dict[int, int] = {}
        self._journal: list[Entry] = []
        self._copy = pickle.dumps(self._record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record.core, name)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        self._events += 1
        rank = event.rank
        if isinstance(event, Join) and rank not in self._record.streams:
            self._apply(Entry(None, StreamBegun(rank, "first"), now_s))
        return self._apply(Entry(rank if rank >= 0 else None, event, now_s))

    def _apply(self, entry: Entry) -> list[Instruction]:
        self._journal.append(entry)
        return self._told_by(self._record.apply(entry))

    def _told_by(self, told: list[Instruction]) -> list[Instruction]:
        for one in told:
            count = self._told[one.rank] = self._told.get(one.rank, 0) + 1
            stream = self._record.streams.get(one.rank)
            if stream is not None and count % self._acks_every == 0:
                stream.pending.acknowledge(count)
        if len(self._journal) >= self._copy_every:
            self._copy = pickle.dumps(self._record)
            self._journal.clear()
        if self._events in self._deaths:
            self._deaths.discard(self._events)
            self._die()
        return told

    def _die(self) -> None:
        """What the next one knows is what the last one did, and had told."""
        reach("deaths of the coordinator")
        before, self._record = self._record, pickle.loads(self._copy)
        for entry in self._journal:
            self._record.replay(pickle.loads(pickle.dumps([entry])))
        now = self._record
        assert now.core.aborted == before.core.aborted
        assert now.core.lost == before.core.lost
        assert now.streams.keys() == before.streams.keys()
        for rank, stream in before.streams.items():
            lacks = stream.pending.rest()
            assert now.streams[rank].taken == stream.taken
            assert now.streams[rank].pending.rest()[-len(lacks) :] == lacks or not lacks


def dying(core: Coordinator, world_size: int, data: st.DataObject) -> Any:
    return DyingCore(
        core,
        world_size,
        data.draw(st.sets(st.integers(1, 300), min_size=1, max_size=8)),
        data.draw(st.sampled_from([1, 7, 50, 10_000])),
        data.draw(st.sampled_from([1, 3, 10_000])),
    )


@pytest.mark.reaches("deaths of the coordinator", "reductions", "commits")
@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "auto"])
@given(data=st.data())
@settings(max_examples=10)
def test_the_next_coordinator_goes_on_as_the_last_one_would(
    policy: str, data: st.DataObject
) -> None:
    cluster = data.draw(clusters(policy))
    sim = WatchedSimulation(cluster, CHECKED, [])
    sim.core = dying(sim.core, cluster.world_size, data)
    sim.run()
    sim.note()
    if policy == "auto":
        assert not sim.history.aborts
        assert sim.history.finished == set(range(cluster.world_size))
    else:
        check_all(sim)


@pytest.mark.reaches("deaths of the coordinator", "deaths of ranks", "newcomers")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_it_dies_while_steps_lose_ranks_and_gain_others(data: st.DataObject) -> None:
    """Under a launcher, where an epoch is cut for newcomers."""
    sizes = BatchSizes.of(data.draw(st.lists(st.integers(1, 9), min_size=6)))
    joins = tuple(data.draw(st.lists(st.integers(0, 80), max_size=2)))
    deaths = data.draw(st.dictionaries(st.integers(1, 4), st.integers(8, 70)))
    seed, worlds = data.draw(st.integers(0, 99)), list[World]()
    for dies in (True, False):
        world = World(sizes, 3, keeps=True, joins=joins)
        world.core = dying(world.core, 3, data) if dies else world.core
        world.run(random.Random(seed), {**deaths})
        worlds.append(world)
    world, calm = worlds
    assert world.core.aborted == calm.core.aborted
    assert [each.model for each in world.ranks] == [each.model for each in calm.ranks]
    if "before the first epoch" not in (world.core.aborted or ""):
        check(world)
        reach("deaths of ranks", len(world.core.lost))
        reach("newcomers", sum(bool(rank.at_begin) for rank in world.ranks[3:]))


@pytest.mark.reaches("deaths of the coordinator", "too few ranks", "newcomers")
@given(
    moves=st.lists(
        st.sampled_from([0, 0, 1, 1, 2, "dies", "comes", "is ready"]), min_size=20
    ),
    least=st.sampled_from([1, 2]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_it_dies_while_windows_wait_for_ranks(
    moves: list[int | str], least: int, data: st.DataObject
) -> None:
    core = dying(Coordinator(FOUNDERS, survives=True), FOUNDERS, data)
    meetings = [Meeting(plan_of(min_ranks=least), each) for each in (core, None)]
    for meeting in meetings:
        for move in moves:
            if isinstance(move, int):
                meeting.move(move)
            elif move == "dies":
                meeting.lose(1)
            elif move == "comes" and FOUNDERS not in meeting.members:
                meeting.come()
            elif move == "is ready":
                joiner = meeting.members.get(FOUNDERS)
                if joiner is not None and not joiner.is_in:
                    meeting.say(JoinReady(rank=FOUNDERS))
            reach("too few ranks", "waiting for newcomers" in meeting.core.doing)
        reach(
            "newcomers", FOUNDERS in meeting.members and bool(meeting.members[2].starts)
        )
    dead, calm = meetings
    assert dead.told == calm.told
    assert dead.core.aborted is calm.core.aborted is None


def test_what_is_no_event_is_remembered_too() -> None:
    record = RunRecord(2, survives=True)
    entries = [
        Entry(None, StreamBegun(0, "a"), 0.0),
        Entry(0, StoreSet("key", b"value"), 0.0),
        Entry(0, DefaultGroupFormed(rank=0), 0.0),
        Entry(None, Failed(rank=2, error="does not fit", traceback=""), 0.0),
        Entry(LAUNCHER, Failed(rank=2, error="code 1", traceback=""), 0.0),
        Entry(LAUNCHER, Failed(rank=1, error="an error", traceback=""), 0.0),
        Entry(None, StreamBegun(1, "b"), 0.0),  # after the end: it hears of that
    ]
    record.replay(entries)
    assert record.store == {"key": b"value"}
    assert record.expects(2)
    assert not record.expects(-1)
    assert record.commands == 2
    assert record.streams[0].taken == 2
    for rank in (0, 1):
        (told,) = record.streams[rank].pending.rest()
        assert isinstance(told, Abort)
        assert told.rank == rank
        assert "rank 1 failed: an error" in told.reason
    assert "torch.distributed's own process group" in record.core._fatal_loss(0)


@given(st.lists(st.integers(), max_size=30), st.lists(st.integers(0, 40), max_size=5))
def test_an_outbox_keeps_what_the_other_side_lacks(
    messages: list[int], said: list[int]
) -> None:
    outbox = Outbox[int]()
    outbox.add(*messages)
    for taken in said:
        outbox.acknowledge(taken)
    taken = min(max(said, default=0), len(messages))
    assert outbox.rest() == messages[taken:]
    assert bool(outbox) == (taken < len(messages))


def test_a_pause_of_the_coordinator_is_in_durations_and_in_no_deadline() -> None:
    record = RunRecord(2, survives=True)
    assert record.clock_s(1000.0, 7.0) + 7.0 == 1000.0  # the run begins
    record.apply(Entry(LAUNCHER, RankLost(rank=9), 1200.0))
    assert record.clock_s(1290.0, 2.0) + 2.0 == 1290.0  # the next one, 90 s later
    assert record.clock_s(1190.0, 2.0) + 2.0 == 1200.0  # where clocks differ
    core = joined(plan_of("sync", 2))
    core.handle(BarrierReached(rank=1, name="b"), 1200.0)
    told = [core.handle(Tick(), 1200.0 + second) for second in (1, 2, 900, 901)]
    assert told == [[]] * 4
    told = [core.handle(Tick(), 2101.0 + second) for second in range(300)]
    assert "ranks [0] at barrier 'b'" in reason_of(told[299], 2)
