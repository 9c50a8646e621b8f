"""Small runs in every order of what may happen: deliveries, moves, deaths, a join.

Not drawn but all of them: see `tests.sim.exploring.explorer`. In each state survivors
agree on what is committed, and from each the run can come to its end, with every
position once in the model of all who live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.protocol.instructions import Instruction
from elche.coordination.sync import lost_ranks
from elche.coordination.windows import window_policy
from elche.coordination.windows.reductions import Reduction
from elche.coordination.windows.window_state import WindowState
from elche.sim.cluster import Cluster, Device, SimulatedRun
from tests.coordination.sync import step_world
from tests.sim.exploring.explorer import Bounds, Explored, Explorer, ViolationError
from tests.sim.exploring.rank_states import Script
from tests.sim.exploring.window_rank import WindowRank

POLICIES = pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
KEEPS = pytest.mark.parametrize("keeps", [True, False], ids=["shared", "gloo"])
SLOW_CADENCE = pytest.param("cadence", marks=pytest.mark.slow)
SLOW_ASYNC = pytest.param("async", marks=pytest.mark.slow)
LARGER: list[tuple[str, int, int, dict[str, Any]]] = [
    ("sync", 2, 3, {"deaths": 1, "loses": True}),
    ("sync", 3, 2, {"deaths": 1, "keeps": False, "is_delayed": False}),
    ("cadence", 2, 3, {"deaths": 1, "loses": True}),
    ("cadence", 3, 2, {"deaths": 1, "is_delayed": False}),
    ("cadence", 2, 2, {"joins": 1, "is_delayed": False}),
    ("async", 2, 3, {"deaths": 1, "keeps": False}),
]


def explore(
    policy: str, ranks: int, batches: int, *, keeps: bool = True, **bounds: Any
) -> Explored:
    """A run of one epoch, in which a global batch has a sample for each rank.

    Args:
        policy: of the run.
        ranks: at its start.
        batches: global ones; windows cut each into one of a sample for each rank.
        keeps: see `Script`.
        bounds: see `Bounds`.
    """
    is_sync = policy == "sync"
    run = SimulatedRun(
        policy=policy,
        batch_sizes=((ranks, batches),),
        options={} if is_sync else {"windows": {"max_anchor": 0}},
    )
    device = Device(seconds_per_sample=0.25, count=ranks, prefetch=0, name="CPU")
    process, facts = (
        (step_world.Rank, of_steps) if is_sync else (WindowRank, of_windows)
    )
    cluster = Cluster(run=run, devices=(device,))
    script = Script(cluster=cluster, process=process, facts=facts, keeps=keeps)
    found = Explorer(script, Bounds(**bounds), check).explore()
    print(f"{policy}, {ranks} ranks, {batches} batches, {bounds}: {found}")
    return found


def of_windows(rank: WindowRank) -> tuple[Any, int]:
    return rank.common, rank.reduced


def of_steps(rank: step_world.Rank) -> tuple[Any, int]:
    """Who lacks the sums of a pass may still read them, and nothing before."""
    return tuple(rank.model), rank.closed - 2


def check(models: Iterable[Any], positions: int) -> None:
    """All hold one model, with each position once."""
    (model,) = {*models}
    flat = chain.from_iterable(p if isinstance(p, tuple) else (p,) for p in model)
    assert sorted(flat) == [*range(positions)], model


@POLICIES
def test_nothing_happens(policy: str) -> None:
    """Messages are late, and ranks of any speed."""
    found = explore(policy, 2, 3)
    assert found.survivors == {frozenset({0, 1})}
    assert found.states > 1_000


@KEEPS
@POLICIES
def test_one_of_two_dies(policy: str, keeps: bool) -> None:
    """Either, at any moment, with any of its last messages; and others are late."""
    found = explore(policy, 2, 2, keeps=keeps, deaths=1, loses=True)
    assert found.survivors == {frozenset({0, 1}), frozenset({0}), frozenset({1})}
    assert found.kinds["dies"] > 1_000
    assert found.states > 2_000


@pytest.mark.parametrize("policy", ["sync", SLOW_CADENCE, SLOW_ASYNC])
def test_two_of_three_die(policy: str) -> None:
    """One after the other, at once, or while the next group forms."""
    found = explore(policy, 3, 1, deaths=2, is_delayed=False)
    assert len(found.survivors) == 7
    assert found.kinds["dies"] > 1_000


@pytest.mark.parametrize("policy", ["sync", "cadence", SLOW_ASYNC])
def test_one_joins(policy: str) -> None:
    found = explore(policy, 2, 1, joins=1, is_delayed=False)
    assert found.survivors == {frozenset({0, 1}), frozenset({0, 1, 2})}
    assert found.states > 300


JOIN_AND_DEATH = {"deaths": 1, "joins": 1, "is_delayed": False}


@pytest.mark.parametrize(
    ("policy", "batches"),
    [
        ("sync", 2),
        pytest.param("cadence", 1, marks=pytest.mark.slow),
        pytest.param("async", 1, marks=pytest.mark.slow),
    ],
)
def test_one_joins_and_one_dies(policy: str, batches: int) -> None:
    """The newcomer, or one of those that were there, before it or after."""
    found = explore(policy, 2, batches, **JOIN_AND_DEATH)
    joined = {frozenset({0, 1, 2}), frozenset({0, 2}), frozenset({1, 2})}
    alone = {frozenset({0, 1}), frozenset({0}), frozenset({1})}
    assert found.survivors == joined | alone
    assert found.states > 5_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "ranks", "batches", "bounds"),
    LARGER,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_larger_ones(
    policy: str, ranks: int, batches: int, bounds: Mapping[str, Any]
) -> None:
    assert explore(policy, ranks, batches, **bounds).states > 5_000


def commit_at_the_first(reduction: Reduction, ranks: Iterable[int]) -> None:
    """A window is committed when the first survivor holds it."""
    reduction.plan = replace(reduction.plan, attempt=reduction.plan.attempt + 1)
    reduction.missing = {min(ranks)}
    reduction.reports.clear()


def return_twice(ledger: EpochLedger, holder: int) -> int:
    """Leases that go back come into the pool twice."""
    ledger._return(list(ledger._holdings[holder].leased))
    return RETURN(ledger, holder)


RETURN = EpochLedger.give_back


def redo_always(
    state: WindowState, reduced: Mapping[int, int]
) -> Sequence[Instruction]:
    """Nobody is asked who holds the result."""
    return RESUME(state, dict.fromkeys(reduced, -1))


RESUME = window_policy.resume_reduction


def ask_nobody(places: Any) -> lost_ranks.Settlement:
    """The pass is reduced anew, whoever has its sums."""
    found = lost_ranks.settle(places)
    return replace(found, source=None)


@pytest.mark.parametrize(
    ("policy", "where", "name", "fault"),
    [
        ("cadence", Reduction, "again", commit_at_the_first),
        ("async", EpochLedger, "give_back", return_twice),
        ("cadence", window_policy, "resume_reduction", redo_always),
        ("sync", step_world, "settle", ask_nobody),
    ],
)
def test_a_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, policy: str, where: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(ViolationError, match=r"after:\nbegin\nmoves rank"):
        explore(policy, 3, 1, deaths=1, is_delayed=False)
