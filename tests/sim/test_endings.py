"""Ranks that fail, vanish or hang, and deadlines."""

from __future__ import annotations

import pytest

from elche.coordination.protocol.events import EpochOpened, Left
from elche.coordination.protocol.instructions import Abort
from elche.coordination.state import Coordinator
from elche.sim.cluster import Cluster, Device, Fault, SimulatedRun
from elche.sim.rank import join_of
from elche.sim.simulation import TICK_S, Simulation
from tests.sim.checks import CHECKED, batches_of, simulate


@pytest.mark.parametrize(
    ("fault", "says", "traceback"),
    [
        (Fault(at_s=0.5, kill_rank=1), "rank 1 is gone", ""),
        (Fault(at_s=0.5, fail_rank=1), "rank 1 failed: ValueError: x", "T"),
    ],
)
def test_a_rank_that_fails_or_vanishes_ends_sync_for_all_others_at_once(
    fault: Fault, says: str, traceback: str
) -> None:
    """Without a launcher."""
    run = SimulatedRun(policy="sync", samples=4800, batch_size=8)
    device = Device(seconds_per_sample=0.005, count=3, jitter=0.1)
    sim = Simulation(Cluster(run=run, devices=(device,), faults=(fault,)), CHECKED)
    sim.core = Coordinator(3)
    sim.run()
    assert sim.engine.now_s <= 0.5 + 3.0 * 8 * device.seconds_per_sample
    assert sim.history.windows
    found = sim.history.aborts
    assert {rank: abort.failed_rank for rank, abort in found.items()} == {0: 1, 2: 1}
    assert all(says in abort.reason for abort in found.values())
    assert {abort.traceback for abort in found.values()} == {traceback}


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize(
    ("at_s", "doing"),
    [(0.0, "waiting for ranks [1] to join"), (0.0015, "[1]"), (0.5, "[1]")],
)
def test_a_rank_that_hangs_is_named_when_the_deadline_passes(
    policy: str, at_s: float, doing: str
) -> None:
    speeds = (0.01, 0.02, 0.01)
    cluster = Cluster(
        run=SimulatedRun(
            policy=policy, samples=2400, batch_size=8, options={"timeout_s": 7.0}
        ),
        devices=tuple(Device(seconds_per_sample=s) for s in speeds),
        faults=(Fault(at_s=at_s, hang_rank=1),),
    )
    sim = simulate(cluster)
    assert set(sim.history.aborts) == {0, 2}
    for abort in sim.history.aborts.values():
        assert abort.kind == "deadline"
        silent = "ranks [0, 1, 2]" if policy == "sync" and at_s else doing
        assert silent in abort.reason  # a step of sync ends on all ranks or on none
    deadline_s = 300.0 if at_s == 0.0 else 7.0
    last_s = max(
        (each.start_s + each.duration_s for each in batches_of(sim)), default=0.0
    )
    assert sim.engine.now_s <= last_s + deadline_s + 2 * TICK_S + 1.0


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_that_leaves_while_another_opens_an_epoch_ends_the_run(
    policy: str,
) -> None:
    device = Device(seconds_per_sample=0.01, count=2)
    cluster = Cluster(run=SimulatedRun(policy=policy, samples=160), devices=(device,))
    core = Simulation(cluster).core
    for rank in (0, 1):
        core.handle(join_of(cluster, rank, device), 0.0)
    assert core.handle(Left(rank=0), 1.0) == []
    core.check()
    told = core.handle(EpochOpened(rank=1, epoch=0), 2.0)
    aborts = [message for message in told if isinstance(message, Abort)]
    assert len(aborts) == len(told) == 2
    assert "ranks [0] have left" in aborts[0].reason
