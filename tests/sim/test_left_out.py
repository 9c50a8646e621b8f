"""Ranks left out of ``sync`` in whole runs: when that pays, and when they come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches, LeaveOut
from elche.coordination.sync.step_reports import RATE_MOVES
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.sim.cluster import Cluster, Device, Drift, Fault, Link, SimulatedRun
from elche.sim.simulation import Simulation
from tests.harness.reached import reach
from tests.sim.checks import (
    CHECKED,
    batches_of,
    check_all,
    is_ended_by_a_death,
    told,
)
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
    jitter: float = 0.1,
    **options: Any,
) -> Simulation:
    """Ranks of these speeds; ``drift`` is of the last one."""
    last = len(speeds) - 1
    devices = tuple(
        Device(
            name="CPU",
            seconds_per_sample=SAMPLE_S / speed,
            seconds_per_batch=fixed_s / speed,
            jitter=jitter,
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


def move_rates(patch: pytest.MonkeyPatch) -> None:
    """Every rank's loop sets its learning rate by hand."""
    take = SyncPolicy._take

    def moved(policy: SyncPolicy, event: StepsDone) -> None:
        take(policy, replace(event, unknown=RATE_MOVES))

    patch.setattr(SyncPolicy, "_take", moved)


def pair(
    slow: Device, fast: Device | None = None, changes: Any = None, **options: Any
) -> Simulation:
    """One long epoch of a fast rank and a slow one; ``changes`` are of the run."""
    run = SimulatedRun(policy="sync", samples=2000 * BATCH, batch_size=BATCH, seed=3)
    kept = {"link": Link(latency_s=1e-4, bytes_per_s=1e10), **options}
    cluster = Cluster(
        run=replace(run, **changes or {}), devices=(fast or device(), slow), **kept
    )
    sim = WatchedSimulation(cluster, CHECKED)
    sim.run()
    check_all(sim)
    return sim


def delivered(sim: Simulation, since_s: float, until_s: float) -> float:
    """Steps in a span of time, as a fraction of those of the fast device alone."""
    starts_s = [each.start_s for each in batches_of(sim) if not each.rank]
    steps = sum(since_s <= start_s < until_s for start_s in starts_s)
    return steps * SAMPLE_S * BATCH / (until_s - since_s)


def device(**changes: Any) -> Device:
    return Device(**{"seconds_per_sample": SAMPLE_S, "jitter": 0.1, **changes})


SLOWED = Drift(at_s=5.0, factor=6.0)
SLOW = {
    "slow": (device(seconds_per_batch=0.06), {}),
    "loader": (device(load_seconds_per_sample=0.04), {}),
    "link": (device(), {"link": Link(latency_s=1e-4, bytes_per_s=3e7)}),
    "later": (device(seconds_per_batch=0.01, drift=(SLOWED,)), {}),
}
"""Slow ranks, and the options of their cluster."""


@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("moves", [False, True], ids=["steady", "moving rate"])
def test_ten_seconds_after_a_rank_is_slow_the_fast_one_trains_as_if_alone(
    case: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moves:
        move_rates(monkeypatch)
    slow, options = SLOW[case]
    sim = pair(slow, **options)
    since_s = 10.0 + 5.0 * (case == "later")
    lines = [one.reason for one in told(sim, LeaveOut, 0) if one.reason]
    assert "rank 1 excluded: " in lines[0]
    assert ("none returns, because" in lines[0]) == moves
    assert delivered(sim, since_s, 30.0) > 0.95


@pytest.mark.parametrize("moves", [False, True], ids=["steady", "moving rate"])
def test_it_returns_in_the_same_epoch_unless_state_has_moved(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moves:
        move_rates(monkeypatch)
    drift = SLOWED, Drift(at_s=12.0, factor=1.0)
    sim = pair(device(seconds_per_batch=0.01, drift=drift))
    lines = [one.reason for one in told(sim, LeaveOut, 0) if one.reason]
    assert lines[0].startswith("rank 1 excluded: ")
    returns = [line for line in lines if line.startswith("rank 1 takes part again: ")]
    assert len(returns) == (not moves)
    last = delivered(sim, sim.end_s - 10.0, sim.end_s)
    assert last > 1.3 if returns else 0.95 < last < 1.1


@pytest.mark.parametrize("pause_s", [0.0, 4.0])
def test_a_wrong_exclusion_ends_and_a_right_one_comes_back(pause_s: float) -> None:
    """Loading hides behind reductions; or the fast rank is slow for some seconds.

    Once the first run took twice as long, since every trial failed.
    """
    slow = fast = device(load_seconds_per_sample=0.005)
    if pause_s:
        drift = Drift(at_s=5.0, factor=9.0), Drift(at_s=5.0 + pause_s, factor=1.0)
        slow, fast = device(seconds_per_batch=0.06), device(drift=drift)
    changes = {"samples": 1000 * BATCH, "model_bytes": 1e6}
    sim = pair(slow, fast, changes, link=Link(bytes_per_s=1e9 if pause_s else 2e7))
    assert sim.end_s < (50.0 if pause_s else 90.0)


def test_a_rank_that_slows_with_the_others_is_soon_excluded_again() -> None:
    """Once it took part for half a minute, unsaid: steps alone seemed mispredicted."""
    drift = (Drift(at_s=40.0, factor=3.0),)
    sim = pair(device(seconds_per_batch=0.06, drift=drift), device(drift=drift))
    changes = [
        (at_s, one)
        for at_s, one in sim.messages
        if isinstance(one, LeaveOut) and one.rank == 0 and at_s > 40.0
    ]
    (began_s, began), (_, said), (ended_s, ended) = changes[:3]
    assert not began.left_out
    assert said.reason == "rank 1 takes part again: no time was saved"
    assert ended.left_out == (1,)
    assert ended_s - began_s < 8.0


def test_an_exclusion_that_saves_nothing_is_not_repeated_all_the_time() -> None:
    """Once 15 times in 200 s: trials of ranks that are not slow seemed to be free."""
    loads = device(load_seconds_per_sample=0.003)
    link = Link(latency_s=1e-4, bytes_per_s=5e7)
    sim = pair(loads, loads, {"model_bytes": 1e6}, link=link)
    assert 1 <= sum(bool(one.left_out) for one in told(sim, LeaveOut, 0)) < 5


def test_shares_follow_in_short_epochs_whose_groups_change_twice() -> None:
    """The first step of a group is cold. Once: it was granted with the others."""
    drift = (Drift(at_s=5.0, factor=6.0),)
    devices = device(), device(drift=drift), device(seconds_per_batch=0.1)
    run = SimulatedRun(
        policy="sync", samples=4 * BATCH, batch_size=BATCH, epochs=150, seed=3
    )
    link = Link(latency_s=1e-4, bytes_per_s=1e10)
    sim = WatchedSimulation(Cluster(run=run, devices=devices, link=link), CHECKED)
    sim.run()
    shares = [one.shares for one in told(sim, GrantBatches, 0)]
    early, late = shares[60], shares[-1]
    assert early == (16, 16, 0)
    assert late[2] == 0
    assert 25 < late[0] < 30, "28 and 4 take 28 and 24 ms"


def test_a_new_group_is_cold_but_compiles_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each change of the group took as long as the rank's first batch."""
    take, cold = SyncPolicy._take, list[StepsDone]()

    def noted(policy: SyncPolicy, event: StepsDone) -> None:
        cold.extend([] if event.warm else [event])
        take(policy, event)

    monkeypatch.setattr(SyncPolicy, "_take", noted)
    ends_s = []
    for first_s in (2.0, 0.0):
        cold.clear()
        slow = device(seconds_per_batch=0.06, first_batch_s=first_s)
        run = SimulatedRun(
            policy="sync", samples=20 * BATCH, batch_size=BATCH, epochs=30, seed=3
        )
        sim = WatchedSimulation(Cluster(run=run, devices=(device(), slow)), CHECKED)
        sim.run()
        ends_s.append(sim.end_s)
        changes = sum(bool(one.left_out) for one in told(sim, LeaveOut, 0))
        assert changes > 20
        assert len(cold) >= changes or not first_s
    assert ends_s[0] - ends_s[1] < 1.5 * 2.0


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


@pytest.mark.parametrize("world_size", [6, 8])
def test_equal_ranks_whose_times_scatter_are_not_left_out(world_size: int) -> None:
    """Each ends a step last by turns. Once: the waits for it were not predicted."""
    assert told(run([1.0] * world_size, epochs=3, jitter=0.4), LeaveOut) == []


def test_a_slow_first_rank_is_named_and_kept() -> None:
    sim = run([0.02, 1.0], epochs=2)
    (one,) = told(sim, LeaveOut, 0)
    assert not one.left_out
    assert "rank 0, but all keep a share: this rank is never excluded" in one.reason


@pytest.mark.reaches("outlived")
@given(
    at_s=st.floats(0.5, 12.0),
    rank=st.integers(1, 2),
    joins=st.booleans(),
    moves=st.booleans(),
)
@settings(max_examples=10)
def test_ranks_left_out_take_over_when_others_die_or_join(
    at_s: float, rank: int, joins: bool, moves: bool
) -> None:
    """Where their rates move, those that have left stay out."""
    new = Device(seconds_per_sample=SAMPLE_S, name="CPU")
    fault = Fault(at_s=at_s, join=new) if joins else Fault(at_s=at_s, kill_rank=rank)
    with pytest.MonkeyPatch.context() as patch:
        if moves:
            move_rates(patch)
        sim = run([1.0, 1.0, 0.01], epochs=3, faults=(fault,))
    reach("outlived", not is_ended_by_a_death(sim))
    assert sim.history.aborts or len(sim.history.committed) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_death_of_the_others_ends_a_run_with_a_rank_gone_for_good(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has left lacks what its loop would have moved."""
    move_rates(monkeypatch)
    fault = Fault(at_s=20.0, kill_rank=rank)
    sim = run([1.0, 0.01, 1.0], epochs=10, faults=(fault,))
    reasons = {abort.reason for abort in sim.history.aborts.values()}
    if rank:
        assert not reasons
        assert len(sim.history.committed) == 10
    else:
        assert "rank 1, the next one to lead, is excluded for good" in str(reasons)
