"""Every moment of small runs, at which a rank of a launcher's run dies."""

from __future__ import annotations

from functools import partial

import pytest

from elche.coordination.agreement import Settings
from elche.sim import rank as sim_rank
from elche.sim.cluster import Cluster, Device, Fault, Link, SimulatedRun
from elche.sim.simulation import Simulation
from tests.sim.checks import simulate

WINDOWS = {"windows": {"local_batch_size": 4}}


def run(
    policy: str, faults: tuple[Fault, ...], **options: object
) -> tuple[Simulation, str]:
    """A small run, and why it was ended."""
    cluster = Cluster(
        run=SimulatedRun(
            policy=policy,
            samples=160,
            batch_size=8,
            model_bytes=1e6,
            epochs=2,
            seed=3,
            options={**({} if policy == "sync" else WINDOWS), **options},
        ),
        devices=(Device(seconds_per_sample=0.002, count=3, jitter=0.2, name="CPU"),),
        link=Link(latency_s=0.001, bytes_per_s=1e8, efficiency=1.0),
        faults=faults,
    )
    sim = simulate(cluster, ticks=True)
    return sim, sim.core.aborted or ""


CODED = {"codec": "int8"}


@pytest.mark.parametrize(
    ("policy", "rank", "options", "says"),
    [
        ("async", 1, {"survive": False}, "ends survive=False"),
        ("sync", 1, CODED, "ends codec='int8' under policy 'sync'"),
    ],
)
def test_what_ends_the_run_is_named(
    policy: str, rank: int, options: dict[str, object], says: str
) -> None:
    half_s = run(policy, (), **options)[0].end_s / 2
    _, reason = run(policy, (Fault(at_s=half_s, kill_rank=rank),), **options)
    assert says in reason
    assert "--max-restarts" in reason


def test_a_sampler_with_a_state_of_its_own_dies_with_the_rank_that_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = partial(Settings, own_sampler="Bucketed")
    monkeypatch.setattr(sim_rank, "Settings", settings)
    half_s = run("cadence", ())[0].end_s / 2
    _, reason = run("cadence", (Fault(at_s=half_s, kill_rank=0),))
    assert "rank 0 drew the samples' order from the script's own Bucketed" in reason
    sim, reason = run("cadence", (Fault(at_s=half_s, kill_rank=1),))
    assert not reason
    assert sim.core.lost == {1}
