"""Ranks left out of ``sync`` in whole runs: when that pays, and when they come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.instructions import LeaveOut
from elche.sim.cluster import Cluster, Device, Drift, Fault, Link, SimulatedRun
from elche.sim.simulation import Simulation
from tests.harness.reached import reach
from tests.sim.checks import CHECKED, check_all, is_ended_by_a_death, told
from tests.sim.watched import WatchedSimulation

SAMPLE_S, BATCH, STEPS = 0.001, 32, 120


def run(
    speeds: list[float],
    *,
    epochs: int = 6,
    faults: tuple[Fault, ...] = (),
    link: Link | None = None,
    fixed_s: float = 0.002,
    drift: tuple[Drift, ...] = (),
    **options: Any,
) -> Simulation:
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
    sim = WatchedSimulation(cluster, CHECKED)
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
    reach(
        "ranks left out",
        sum(bool(one.left_out) for one in told(ends_s[1], LeaveOut, 0)),
    )


@given(world_size=st.integers(2, 6), fixed_s=st.sampled_from([0.0, 0.01]))
@settings(max_examples=6)
def test_equal_ranks_are_never_left_out(world_size: int, fixed_s: float) -> None:
    assert told(run([1.0] * world_size, epochs=3, fixed_s=fixed_s), LeaveOut) == []


def test_a_throttled_rank_comes_back_when_it_is_released() -> None:
    throttled = Drift(at_s=2.0, factor=20.0), Drift(at_s=30.0, factor=1.0)
    sim = run([1.0, 1.0], epochs=16, drift=throttled)
    lines = [one.reason for one in told(sim, LeaveOut, 0) if one.reason]
    assert "rank 1 excluded: steps of" in lines[0]
    assert lines[1].startswith("rank 1 takes part again: ")
    assert len(lines) == 2
    last = sim.history.trained[0, 15]
    own = sum(stop - start for rank, start, stop in last if rank)
    assert own > 0.4 * STEPS * BATCH


def test_a_slow_first_rank_is_named_and_kept() -> None:
    sim = run([0.02, 1.0], epochs=2)
    (one,) = told(sim, LeaveOut, 0)
    assert not one.left_out
    assert "rank 0, but all keep a share: this rank is never excluded" in one.reason


@pytest.mark.reaches("outlived")
@given(at_s=st.floats(0.5, 12.0), rank=st.integers(1, 2), joins=st.booleans())
@settings(max_examples=10)
def test_ranks_left_out_take_over_when_others_die_or_join(
    at_s: float, rank: int, joins: bool
) -> None:
    new = Device(seconds_per_sample=SAMPLE_S, name="CPU")
    fault = Fault(at_s=at_s, join=new) if joins else Fault(at_s=at_s, kill_rank=rank)
    sim = run([1.0, 1.0, 0.01], epochs=3, faults=(fault,))
    reach("outlived", not is_ended_by_a_death(sim))
    assert sim.history.aborts or len(sim.history.committed) == 3
