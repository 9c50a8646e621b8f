"""Updates that are not finite, in simulated windows: discarded, counted once, told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import BatchesDone, WindowClosed
from elche.coordination.protocol.instructions import EndEpoch
from elche.sim.cluster import Cluster
from elche.sim.simulation import Simulation
from tests.sim.checks import is_ended_by_a_death, metrics_of_epochs, simulate, told
from tests.sim.strategies import WHOLE, clusters


def windows_of(sim: Simulation) -> list[tuple[list[int], bool]]:
    """Windows in which ranks had batches: which, and whether they were finite."""
    had: dict[int, list[int]] = {}
    found: list[tuple[list[int], bool]] = []
    for _, event in sim.messages:
        if isinstance(event, BatchesDone):
            had.setdefault(event.rank, []).extend(range(event.start, event.stop))
        elif isinstance(event, WindowClosed) and had.get(event.rank):
            found.append((had.pop(event.rank), event.is_finite))
    return found


def with_bad(data: st.DataObject, cluster: Cluster) -> Cluster:
    """Some of its batches give no number."""
    last = BatchSizes(cluster.run.sizes).num_batches - 1
    bad = data.draw(st.sets(st.integers(0, last), max_size=max(1, last // 4)))
    windows = {
        **cluster.run.options.get("windows", {}),
        "local_batch_size": WHOLE,
        "non_finite": "leave_out",
    }
    options = {**cluster.run.options, "windows": windows}
    run = replace(cluster.run, bad_batches=tuple(bad), options=options)
    return replace(cluster, run=run)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("policy", ["cadence", "async"])
@given(data=st.data())
@settings(max_examples=80)
@pytest.mark.every(3)
def test_every_batch_is_in_the_model_or_discarded_once(
    policy: str, changes: bool, data: st.DataObject
) -> None:
    """Whatever is bad, and whoever dies or joins; the books find what is not."""
    cluster = data.draw(clusters(policy, changes=changes))
    cluster = with_bad(data, cluster)
    sim = simulate(cluster)
    history, (books,) = sim.history, sim.books
    if not changes:
        assert not history.aborts, next(iter(history.aborts.values())).reason
        assert history.finished == set(range(cluster.world_size))
    elif is_ended_by_a_death(sim) or not history.finished:
        return  # nobody is left who could tell
    sizes, bad = BatchSizes(cluster.run.sizes), set(cluster.run.bad_batches)
    everything = set(range(sizes.num_batches))

    def at(position: int) -> int:
        return int(sizes.batches_in(position))

    for epoch in range(cluster.run.epochs):
        gone = {at(start) for e, start, _ in books.discarded if e == epoch}
        assert bad <= gone
        assert history.committed[0, epoch] == everything - gone
    if changes:
        return
    spoilt: Counter[int] = Counter()
    for batches, is_finite in windows_of(sim):
        assert is_finite == (not bad.intersection(batches))
        spoilt.update([] if is_finite else batches)
    assert spoilt == Counter(at(start) for _, start, _ in books.discarded)
    metrics = metrics_of_epochs(sim)
    for epoch, metric in enumerate(metrics):
        gone = {at(start) for e, start, _ in books.discarded if e == epoch}
        lost = sum(sizes.samples_in(batch, batch + 1) for batch in gone)
        assert sum(metric.discarded_samples) == lost
        assert metric.samples == sizes.num_samples - lost
    ends = told(sim, EndEpoch, rank=0)
    assert [end.samples for end in ends] == [each.samples for each in metrics]
