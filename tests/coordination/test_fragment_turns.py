"""Fragments take turns, and all are synchronised before an epoch ends. Simulated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.instructions import EndEpoch, Instruction, Reduce
from elche.sim.cluster import Break, Cluster, Device, Link, Run
from elche.sim.simulation import Simulation, Watch

MOST_HAPPENINGS = 200_000


def told_to_rank_0(cluster: Cluster) -> list[Reduce | EndEpoch]:
    """Reductions and ends of epochs, in the order in which a rank is told them."""
    watch = Watch(checks=True, details=True, most_happenings=MOST_HAPPENINGS)
    sim, told = Simulation(cluster, watch), []
    handle = sim.core.handle

    def listen(event: object, now_s: float) -> list[Instruction]:
        answer = handle(event, now_s)  # type: ignore[arg-type]
        told.extend(answer)
        return answer

    sim.core.handle = listen  # type: ignore[method-assign,assignment]
    sim.run()
    assert not sim.history.aborts
    return [
        each for each in told if isinstance(each, (Reduce, EndEpoch)) and each.rank == 0
    ]


def check_turns(told: list[Reduce | EndEpoch], fragments: int) -> list[int]:
    """One fragment after the other, and all before an end; lengths of the epochs."""
    turns: list[int | None] = []
    lengths = []
    for each in told:
        if isinstance(each, Reduce):
            turns.append(each.fragment)
            continue
        if turns:
            assert turns[-1] is None
        for number, turn in enumerate(turns):
            assert turn in (None, number % fragments)
        lengths.append(len(turns))
        turns = []
    return lengths


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, int]:
    """Windows of few batches, and loops that may break off anywhere."""
    fragments = draw(st.integers(2, 5))
    devices = tuple(
        Device(seconds_per_sample=0.002 * draw(st.integers(1, 5)), prefetch=prefetch)
        for prefetch in draw(st.lists(st.integers(0, 3), min_size=2, max_size=4))
    )
    broken = draw(st.booleans())
    run = Run(
        policy=draw(st.sampled_from(["cadence", "async"])),
        samples=160,
        batch_size=8,
        epochs=2,
        seed=draw(st.integers(0, 9)),
        options={"fragments": fragments, "max_anchor": draw(st.integers(1, 3))},
    )
    breaks = (Break(rank=0, epoch=0, batches=draw(st.integers(1, 6))),)
    link = Link(latency_s=draw(st.sampled_from([0.0, 0.01])), bytes_per_s=1e8)
    cluster = Cluster(
        run=run, devices=devices, link=link, breaks=breaks if broken else ()
    )
    return cluster, fragments


@given(clusters())
@settings(max_examples=60)
def test_an_epoch_ends_with_all_fragments(drawn: tuple[Cluster, int]) -> None:
    cluster, fragments = drawn
    told = told_to_rank_0(cluster)
    assert len(check_turns(told, fragments)) == 2


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_windows_go_round(policy: str, deterministic: bool) -> None:
    options = {"fragments": 3, "max_anchor": 1, "deterministic": deterministic}
    run = Run(policy=policy, samples=160, batch_size=8, epochs=2, options=options)
    devices = (Device(seconds_per_sample=0.01, count=2),)
    lengths = check_turns(told_to_rank_0(Cluster(run=run, devices=devices)), 3)
    assert min(lengths) > 5


def test_one_fragment_is_none() -> None:
    run = Run(policy="async", samples=160, batch_size=8)
    devices = (Device(seconds_per_sample=0.01, count=2),)
    told = told_to_rank_0(Cluster(run=run, devices=devices))
    assert {each.fragment for each in told if isinstance(each, Reduce)} == {None}
