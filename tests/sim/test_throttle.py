"""`max_batch_diff` in whole runs: how far a rank leads since a synchronisation."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import BatchesDone, Event
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from tests.harness.reached import reach
from tests.sim.checks import CHECKED, check_all
from tests.sim.watched import WatchedSimulation


def leads(cluster: Cluster) -> list[int]:
    """By how much a rank led the slowest, whenever a batch of it was done.

    Counted since the end of the last window that is in all models. Overlapped, that is
    the one before last until the last one's result has come.
    """
    sim = WatchedSimulation(cluster, CHECKED)
    overlapped = cluster.run.policy == "async"
    done: list[Counter[int]] = [Counter() for _ in range(cluster.world_size)]
    found: list[int] = []
    send = sim.send

    def lead(rank: int, base: int) -> int:
        since = [
            sum(count for window, count in counts.items() if window >= base)
            for counts in done
        ]
        return since[rank] - min(since)

    def note(event: Event) -> None:
        if isinstance(event, BatchesDone):  # at once after each, under a throttle
            done[event.rank][event.window] += event.stop - event.start
            last = event.window
            bases = (last - 1, last) if overlapped else (last,)
            found.append(min(lead(event.rank, base) for base in bases))
        send(event)

    with patch.object(sim, "send", note):
        sim.run()
    sim.note()
    check_all(sim)
    return found


def cluster_of(
    policy: str,
    most: int,
    speeds: list[float],
    latency_s: float = 0.0,
    jitter: float = 0,
) -> Cluster:
    return Cluster(
        run=SimulatedRun(
            policy=policy,
            options={"windows": {"max_batch_diff": most, "local_batch_size": 8}},
            samples=8 * 60,
            batch_size=8,
            seed=3,
        ),
        devices=tuple(
            Device(seconds_per_sample=0.001 / speed, jitter=jitter) for speed in speeds
        ),
        link=Link(latency_s=latency_s, bytes_per_s=1e9),
    )


@pytest.mark.reaches("the most that a rank may lead by", "waits for the slowest")
@given(
    policy=st.sampled_from(["cadence", "async"]),
    most=st.sampled_from([0, 1, 3]),
    speeds=st.lists(st.sampled_from([1.0, 0.6, 0.25, 0.05]), min_size=2, max_size=5),
    latency_s=st.sampled_from([0.0, 0.002, 0.02]),
    jitter=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25)
def test_no_rank_leads_by_more_than_it_may(
    policy: str, most: int, speeds: list[float], latency_s: float, jitter: float
) -> None:
    found = leads(cluster_of(policy, most, speeds, latency_s, jitter))
    assert max(found) <= max(1, most)
    reach("the most that a rank may lead by", max(found) == max(1, most))
