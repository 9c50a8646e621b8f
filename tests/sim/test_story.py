"""Every decision can be explained: the story of a rank, of a lease, of a change."""

from __future__ import annotations

import re

import pytest

from elche.coordination import story as story_module
from elche.sim.cluster import Cluster, Device, Fault, SimulatedRun
from elche.sim.simulation import Simulation
from tests.sim.checks import simulate


def run_of(*faults: Fault, samples: int = 400) -> Simulation:
    devices = tuple(Device(seconds_per_sample=s) for s in (0.002, 0.006))
    run = SimulatedRun(policy="async", samples=samples, batch_size=8, seed=2)
    return simulate(Cluster(run=run, devices=devices, faults=faults))


def test_the_story_of_a_lease_names_who_got_it_and_who_trained_on_it() -> None:
    sim = run_of()
    for batch in (0, 17, 49):
        story = sim.core.lease_story(batch)
        assert len(story) == 2, story
        granted, done = story
        pattern = r"^\d+\.\d{3} %s %s\(rank=(\d), .*epoch=0, .*start=(\d+), stop=(\d+)"
        first = re.match(pattern % ("->", "GrantBatches"), granted)
        second = re.match(pattern % ("<-", "BatchesDone"), done)
        assert first is not None, granted
        assert second is not None, done
        assert first.group(1) == second.group(1)
        assert int(first.group(2)) <= batch < int(first.group(3))


def test_a_lease_that_died_with_its_rank_is_told_twice() -> None:
    sim = run_of(Fault(at_s=0.2, kill_rank=1))
    stories = [sim.core.lease_story(batch) for batch in range(50)]
    grants = [[line for line in one if "GrantBatches" in line] for one in stories]
    died = [each for each in grants if len(each) == 2 and "rank=1" in each[0]]
    assert died
    assert all("rank=0" in after for _, after in died)


def test_the_story_of_a_rank_is_its_own_and_says_why() -> None:
    sim = run_of(Fault(at_s=0.2, kill_rank=1))
    story = sim.core.story(1)
    assert "Join(rank=1" in story[0]
    assert story[-1].endswith("!! lost (disconnected); the others continue")
    assert not any("rank=0" in line for line in story)
    assert any("Regroup(rank=0, generation=1, left=(1,)" in x for x in sim.core.story())


def test_a_story_forgets_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story_module, "STORY_ENTRIES", 200)
    sim = run_of(samples=8 * 200)
    assert len(sim.core.story()) == 200
    assert sim.core.lease_story(0) == []
