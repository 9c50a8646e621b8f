"""The user's guard in a simulated run: asked, obeyed, and named where it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elche.cli import main
from elche.errors import ElcheError
from elche.runtime.guard_import import find_guard
from elche.sim.cluster import Cluster, Device, Link, Run
from elche.sim.comparison import compare
from elche.sim.simulation import Simulation, Watch
from tests.harness import guards

PLACE = "tests.harness.guards"
SAID = "as I said"


def simulated(policy: str, guard: object, **options: Any) -> Simulation:
    slow_link = Link(latency_s=0.001, bytes_per_s=50e6)
    cluster = Cluster(
        run=Run(
            policy=policy,
            samples=4000,
            batch_size=8,
            model_bytes=2e6,
            epochs=2,
            options={"guard": guard, **options},
        ),
        devices=(Device(seconds_per_sample=0.001), Device(seconds_per_sample=0.003)),
        link=slow_link,
    )
    sim = Simulation(cluster, Watch(checks=True), find_guard)
    sim.run()
    return sim


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_users_guard_halves_the_anchor(policy: str) -> None:
    sim = simulated(policy, guards.Halving, anchor=16, max_anchor=16)
    assert not sim.history.aborts
    steps = [line.split("!! ")[1] for line in sim.core.story() if SAID in line]
    assert steps[:4] == [
        f"anchor {before} -> {before // 2}: {SAID}" for before in (16, 8, 4, 2)
    ]
    without = simulated(policy, False, anchor=16, max_anchor=16)
    assert len(without.core.story()) < len(sim.core.story())
    assert not any("anchor 16 ->" in line for line in without.core.story())


def test_auto_asks_the_users_guard_in_its_windows() -> None:
    guards.Shortest.asked.clear()
    sim = simulated("auto", guards.Shortest)
    assert not sim.history.aborts
    assert "sync" not in [phase.policy for phase in sim.history.phases[1:]]
    assert guards.Shortest.asked
    assert {len(seen) for seen in guards.Shortest.asked} == {2}


def test_a_comparison_asks_the_users_guard() -> None:
    run = Run(
        policy="sync",
        samples=800,
        batch_size=8,
        model_bytes=2e6,
        options={"guard": guards.Shortest},
    )
    cluster = Cluster(run=run, devices=(Device(seconds_per_sample=0.001, count=2),))
    guards.Shortest.asked.clear()
    compare(cluster, "two", find_guard)
    assert guards.Shortest.asked
    with pytest.raises(ElcheError, match=r"policy sync: .*cannot be looked up here"):
        compare(cluster, "two")


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "auto"])
@pytest.mark.parametrize(
    ("guard", "says"),
    [
        ("no_such_module:Guard", r"guard 'no_such_module:Guard' cannot be imported"),
        (f"{PLACE}:Missing", "cannot be imported (AttributeError"),
        (f"{PLACE}:NoSubclass", "to name a subclass of elche.Guard"),
        (f"{PLACE}:Demanding", "cannot be made: TypeError"),
    ],
)
def test_a_guard_that_is_none_ends_the_run_before_it_begins(
    policy: str, guard: str, says: str
) -> None:
    sim = simulated(policy, guard)
    assert set(sim.history.aborts) == {0, 1}
    for abort in sim.history.aborts.values():
        assert says in abort.reason
        assert abort.kind == "config"
    assert not sim.history.trained


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize(
    ("guard", "says"),
    [
        (guards.Raising, "raised in observe(): ZeroDivisionError: no spread"),
        (guards.Leaving, "raised in observe(): SystemExit: 3"),
        (guards.Mute, "to return an elche.Verdict from observe(), got None"),
    ],
)
def test_a_guard_that_fails_ends_the_run_for_all(
    policy: str, guard: type[guards.Guard], says: str
) -> None:
    sim = simulated(policy, guard)
    assert set(sim.history.aborts) == {0, 1}
    for abort in sim.history.aborts.values():
        assert says in abort.reason.splitlines()[0]
        assert f"{PLACE}:{guard.__name__}" in abort.reason.splitlines()[0]


def test_a_cluster_file_may_name_a_guard_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "guard_beside_cluster.py").write_text(
        "from tests.harness.guards import Halving\nclass Mine(Halving): pass\n"
    )
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[run]\npolicy = "cadence"\nsamples = 800\nbatch_size = 8\n'
        'anchor = 8\nmax_anchor = 8\nguard = "guard_beside_cluster:Mine"\n'
        "[[device]]\ncount = 2\nseconds_per_sample = 0.001\n"
    )
    result = CliRunner().invoke(main, ["simulate", str(file), "--story", "all"])
    assert result.exit_code == 0, result.output
    assert f"!! anchor 8 -> 4: {SAID}" in result.output
    file.write_text(file.read_text().replace("beside_cluster:", "elsewhere:"))
    result = CliRunner().invoke(main, ["simulate", str(file)])
    assert result.exit_code == 1
    assert "guard 'guard_elsewhere:Mine' cannot be imported" in result.output
