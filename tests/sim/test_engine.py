"""Waits of the engine that a message ends."""

from __future__ import annotations

import pytest

from elche.coordination.protocol.instructions import Regroup
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.engine import Collective, DeadlockError, Engine, Receive, Script

KEY = ("a sum",)


@pytest.mark.parametrize("after_s", [1.0, 3.0], ids=["before the wait", "in it"])
def test_who_hears_of_a_death_waits_no_more_for_ranks_that_formed_another_group(
    after_s: float,
) -> None:
    """None of the collective's members has died: rank 1 has left it, and waits."""
    run = SimulatedRun(policy="sync", samples=8, batch_size=8)
    devices = (Device(seconds_per_sample=0.01, count=2),)
    cluster = Cluster(run=run, devices=devices)
    engine = Engine(cluster, lambda rank, is_aborted: None)
    found: list[tuple[object, float]] = []

    def waits() -> Script:
        yield 2.0
        value = yield engine.arrive(KEY, 0, lambda: Collective([0, 1], 0.1))
        found.append((value, engine.now_s))

    def has_left() -> Script:
        yield Receive("the next group")

    engine.start(0, waits())
    engine.start(1, has_left())
    regroup = Regroup(rank=0, generation=1, left=(2,), joined=())
    engine.at(after_s, engine.deliver, regroup)
    with pytest.raises(DeadlockError, match="rank 1 waits since"):
        engine.run()
    assert found == [(False, max(2.0, after_s))]
