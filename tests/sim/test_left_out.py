"""Ranks left out of ``sync`` in whole runs: when that pays, and when they come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Instruction, LeaveOut
from elche.sim.cluster import Cluster, Device, Drift, Fault, Link, SimulatedRun
from elche.sim.simulation import Watch
from tests.harness.reached import reach
from tests.sim.books import Books
from tests.sim.checks import MOST_HAPPENINGS, check_all, is_ended_by_a_death
from tests.sim.watched import WatchedSimulation

SAMPLE_S, BATCH, STEPS = 0.001, 32, 120


class LeftOutSimulation(WatchedSimulation):
    """Keeps what rank 0 is told of ranks left out, and when."""

    def __init__(self, cluster: Cluster) -> None:
        watch = Watch(books=Books, details=True, most_happenings=MOST_HAPPENINGS)
        super().__init__(cluster, watch)
        self.told: list[tuple[float, LeaveOut]] = []
        self._handle = self.core.handle
        self.core.handle = self._handled  # type: ignore[method-assign]

    def _handled(self, event: Event, now_s: float) -> list[Instruction]:
        answer = self._handle(event, now_s)
        for one in answer:
            if isinstance(one, LeaveOut) and one.rank == 0:
                self.told.append((now_s, one))
        return answer


def run(
    speeds: list[float],
    *,
    epochs: int = 6,
    faults: tuple[Fault, ...] = (),
    link: Link | None = None,
    fixed_s: float = 0.002,
    drift: tuple[Drift, ...] = (),
    **options: Any,
) -> LeftOutSimulation:
    """Ranks of these speeds; ``drift`` is of the last one."""
    last = len(speeds) - 1
    devices = tuple(
        Device(
            name="CPU",
            seconds_per_sample=SAMPLE_S / speed,
            seconds_per_batch=fixed_s / speed,
            jitter=0.1,
            drift=drift if rank == last else (),
        )
        for rank, speed in enumerate(speeds)
    )
    described = SimulatedRun(
        policy="sync",
        samples=STEPS * BATCH,
        batch_size=BATCH,
        epochs=epochs,
        seed=len(speeds),
        options=options,
    )
    link = link or Link(latency_s=1e-4, bytes_per_s=1e10)
    cluster = Cluster(run=described, devices=devices, link=link, faults=faults)
    sim = LeftOutSimulation(cluster)
    sim.run()
    sim.note()
    if not faults:
        check_all(sim)
    return sim


@pytest.mark.reaches("ranks left out")
@given(
    slow=st.lists(st.sampled_from([1.0, 0.3, 0.02, 0.005]), min_size=1, max_size=3),
    fixed_s=st.sampled_from([0.0, 0.01]),
    bytes_per_s=st.sampled_from([1e10, 1e8]),
)
@example(slow=[1.0, 0.02], fixed_s=0.01, bytes_per_s=1e8)  # first one, then the other
@example(slow=[1.0, 0.3, 0.005], fixed_s=0.01, bytes_per_s=1e10)  # all were tried
@settings(max_examples=10)
def test_never_slower_than_the_fastest_alone_beyond_measuring(
    slow: list[float], fixed_s: float, bytes_per_s: float
) -> None:
    """In the epochs after the first two, which measure; some trials are in them.

    Each rank takes part in the first step of an epoch.
    """
    link = Link(latency_s=1e-4, bytes_per_s=bytes_per_s)
    ends_s = [
        run([1.0, *slow], epochs=epochs, link=link, fixed_s=fixed_s)
        for epochs in (2, 6)
    ]
    taken_s = ends_s[1].end_s - ends_s[0].end_s
    alone_s = 4 * STEPS * (SAMPLE_S * BATCH + fixed_s)
    first_s = 4 * 1.5 * (SAMPLE_S + fixed_s) / min(slow)
    assert taken_s < 1.15 * alone_s + first_s
    reach("ranks left out", sum(bool(one.left_out) for _, one in ends_s[1].told))


@given(world_size=st.integers(2, 6), fixed_s=st.sampled_from([0.0, 0.01]))
@settings(max_examples=6)
def test_equal_ranks_are_never_left_out(world_size: int, fixed_s: float) -> None:
    assert run([1.0] * world_size, epochs=3, fixed_s=fixed_s).told == []


def test_a_throttled_rank_comes_back_when_it_is_released() -> None:
    throttled = Drift(at_s=2.0, factor=20.0), Drift(at_s=30.0, factor=1.0)
    sim = run([1.0, 1.0], epochs=16, drift=throttled)
    lines = [one.reason for _, one in sim.told if one.reason]
    assert "rank 1 left out: steps of" in lines[0]
    assert lines[1].startswith("rank 1 takes part again: ")
    assert len(lines) == 2
    last = sim.history.trained[0, 15]
    own = sum(stop - start for rank, start, stop in last if rank)
    assert own > 0.4 * STEPS * BATCH


def test_a_slow_first_rank_is_named_and_kept() -> None:
    sim = run([0.02, 1.0], epochs=2)
    ((_, told),) = sim.told
    assert not told.left_out
    assert "without rank 0, but all keep a share: it is never left out" in told.reason


@pytest.mark.reaches("outlived")
@given(
    at_s=st.floats(0.5, 12.0),
    rank=st.integers(1, 2),
    joins=st.booleans(),
)
@settings(max_examples=10)
def test_ranks_left_out_take_over_when_others_die_or_join(
    at_s: float, rank: int, joins: bool
) -> None:
    new = Device(seconds_per_sample=SAMPLE_S, name="CPU")
    fault = Fault(at_s=at_s, join=new) if joins else Fault(at_s=at_s, kill_rank=rank)
    sim = run([1.0, 1.0, 0.01], epochs=3, faults=(fault,))
    reach("outlived", not is_ended_by_a_death(sim))
    assert sim.history.aborts or len(sim.history.committed) == 3
