"""Work of the coordinator at many ranks: as much for each rank as at few."""

from __future__ import annotations

from typing import Any

import pytest

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Instruction
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.simulation import Simulation
from tests.harness.work import lines_run


def _lines(ranks: int, policy: str) -> int:
    """Lines of the whole run's decisions."""
    sim = Simulation(
        Cluster(
            run=SimulatedRun(
                samples=40 * ranks, batch_size=2 * ranks, policy=policy, model_bytes=1e6
            ),
            devices=(
                Device(seconds_per_sample=0.01, count=ranks // 2, jitter=0.1),
                Device(seconds_per_sample=0.03, count=ranks - ranks // 2, jitter=0.1),
            ),
        )
    )
    handle, counts = sim.core.handle, list[int]()

    def counted(event: Event, now_s: float) -> list[Instruction]:
        told: list[Any] = []
        counts.append(lines_run(lambda: told.extend(handle(event, now_s))))
        return told

    sim.core.handle = counted  # type: ignore[method-assign]
    sim.run()
    assert sim.history.samples == sim.cluster.run.samples
    return sum(counts)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_work_grows_with_the_ranks(policy: str) -> None:
    few_lines, many_lines = _lines(60, policy), _lines(240, policy)
    assert many_lines <= 4.6 * few_lines  # no sum over ranks for each rank
