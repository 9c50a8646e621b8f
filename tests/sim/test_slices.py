"""An event's instructions to many ranks: in slices, and little work for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.state import Coordinator
from elche.errors import TransitionError
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.simulation import Simulation, Watch
from tests.harness.work import lines_run
from tests.sim.strategies import clusters

SLICE = 32
LINES_PER_RANK = 150
"""Most lines of what a slice does for all ranks at once, or for its own."""


def simulated(cluster: Cluster, slice_instructions: int) -> Simulation:
    """A run whose coordinator decides in slices of so many instructions."""
    sim = Simulation(cluster, Watch(checks=True))
    sim.core = Coordinator(
        cluster.world_size, survives=True, slice_instructions=slice_instructions
    )
    sim.run()
    return sim


def _messages(sim: Simulation) -> list[str]:
    """Events and instructions; a decision is noted before its event's first slice."""
    return [line for line in sim.core.story() if " !! " not in line]


@pytest.mark.parametrize(
    "policy",
    [
        "async",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("sync", "cadence", "auto")),
    ],
)
@given(data=st.data(), size=st.integers(1, 3))
@settings(max_examples=30)
def test_slices_change_nothing_but_the_pauses(
    policy: str, data: st.DataObject, size: int
) -> None:
    cluster = data.draw(clusters(policy, breaks=True, changes=policy != "auto"))
    whole, sliced = simulated(cluster, 1000), simulated(cluster, size)
    assert _messages(sliced) == _messages(whole)
    assert sliced.engine.now_s == whole.engine.now_s


def test_an_event_before_the_last_ones_end_is_refused() -> None:
    sim = Simulation(_windows(8), Watch())
    core = sim.core = Coordinator(8, slice_instructions=2)
    handle = core.handle

    def twice(event: Any, now_s: float) -> Any:
        told = handle(event, now_s)
        if core.has_more:
            with pytest.raises(TransitionError, match="before the last one's go_on"):
                handle(event, now_s)
        return told

    core.handle = twice  # type: ignore[method-assign]
    sim.run()
    assert sim.history.samples == sim.cluster.run.samples


def _windows(ranks: int, policy: str = "async") -> Cluster:
    return Cluster(
        run=SimulatedRun(
            samples=40 * ranks, batch_size=2 * ranks, policy=policy, model_bytes=1e6
        ),
        devices=(
            Device(seconds_per_sample=0.01, count=ranks // 2, jitter=0.1),
            Device(seconds_per_sample=0.03, count=ranks - ranks // 2, jitter=0.1),
        ),
    )


def _lines(ranks: int, policy: str) -> tuple[int, int]:
    """Lines of the whole run's decisions, and of the longest slice."""
    sim = Simulation(_windows(ranks, policy))
    core = sim.core = Coordinator(ranks, slice_instructions=SLICE)
    counts: list[int] = []

    def counted(call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def count(*arguments: Any) -> list[Any]:
            told: list[Any] = []
            if core_calls:
                return call(*arguments)
            core_calls.append(1)
            counts.append(lines_run(lambda: told.extend(call(*arguments))))
            core_calls.pop()
            return told

        return count

    core_calls: list[int] = []
    core.handle = counted(core.handle)  # type: ignore[method-assign]
    core.go_on = counted(core.go_on)  # type: ignore[method-assign]
    sim.run()
    assert sim.history.samples == sim.cluster.run.samples
    return sum(counts), max(counts)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_work_grows_with_the_ranks_and_no_slice_has_much(policy: str) -> None:
    few_lines, _ = _lines(60, policy)
    many_lines, longest = _lines(240, policy)
    assert many_lines <= 4.6 * few_lines  # no sum over ranks for each rank
    assert longest <= LINES_PER_RANK * 240
