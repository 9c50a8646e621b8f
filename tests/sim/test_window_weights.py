"""Weights of positions in the averaged model, in any order of joins and deaths.

Where losses are sums, that of a local batch counts as often as its global batch has
local ones; so a position of a drift does, times the drift's part of the mean.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elche.comm.averaging.outer import OuterStep
from elche.coordination.protocol.instructions import Reduce
from elche.sim.cluster import Cluster, Device, Fault, Link, SimulatedRun
from elche.sim.simulation import Simulation, Watch
from elche.sim.window_worker import SimulatedWindowEpoch
from tests.harness.reached import reach
from tests.sim.books import Books, Part

BATCH, BATCHES, EPOCHS = 24, 30, 2
SPEEDS_S = (0.0005, 0.0008, 0.0012)
DEATHS = tuple(Fault(at_s=0.05 * rank, kill_rank=rank) for rank in (1, 2, 3))


class Weights:
    """Weight of each range of positions in each common model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._factors: dict[tuple[int, Part], int] = {}
        self._models: list[dict[Part, float]] = [{}]
        load, reduce = SimulatedWindowEpoch._loaded, Books.reduce

        def loaded(epoch: Any, batch: int) -> Any:
            item, rank = load(epoch, batch), epoch._rank
            for part in item.parts:
                key = rank.rank, (epoch._epoch, *part)
                self._factors[key] = rank.sizes.factor_of(batch)
            return item

        def reduced(books: Books, plans: dict[int, Reduce]) -> int:
            held = dict(self._models[books.model(min(plans)).common])
            for rank, plan in plans.items():
                weight = plan.weight * OuterStep.of(plan).part
                for part in books.model(rank).offered[plan.window]:
                    held[part] = self._factors[rank, part] * weight
            self._models.append(held)
            return reduce(books, plans)

        monkeypatch.setattr(SimulatedWindowEpoch, "_loaded", loaded)
        monkeypatch.setattr(Books, "reduce", reduced)

    def check(self, sim: Simulation) -> None:
        """Each position counts as on one device, whoever was there.

        A cut may leave too few samples of a global batch for all ranks: these count for
        less.
        """
        held = self._models[sim.books[0].model(min(sim.history.finished)).common]
        assert max(held.values()) <= 1.0 + 1e-9
        weights = [weight * (stop - start) for (_, start, stop), weight in held.items()]
        positions = BATCH * BATCHES * EPOCHS
        assert sum(stop - start for _, start, stop in held) == positions
        assert sum(weights) == pytest.approx(positions, rel=0.02)


def run_weighed(policy: str, ranks: int, faults: tuple[Fault, ...]) -> Simulation:
    """A simulated run, checked."""
    run = SimulatedRun(
        policy=policy, batch_sizes=((BATCH, BATCHES),), epochs=EPOCHS, model_bytes=1e5
    )
    devices = tuple(
        Device(seconds_per_sample=SPEEDS_S[rank % 3], jitter=0.2, name="CPU")
        for rank in range(ranks)
    )
    link = Link(latency_s=1e-4, bytes_per_s=1e9, efficiency=1.0)
    cluster = Cluster(run=run, devices=devices, faults=faults, link=link)
    with pytest.MonkeyPatch.context() as monkeypatch:
        weights = Weights(monkeypatch)
        sim = Simulation(cluster, Watch(books=Books, most_happenings=400_000))
        sim.run()
        if sim.core.aborted is None:
            weights.check(sim)
    return sim


@st.composite
def comings(draw: st.DrawFn) -> tuple[int, tuple[Fault, ...]]:
    """Ranks that a run begins with, joins and deaths."""
    ranks, found = draw(st.integers(1, 4)), list[Fault]()
    there = ranks
    for at_s in sorted(draw(st.lists(st.floats(0.02, 0.4), max_size=4))):
        if draw(st.booleans()):
            new = Device(seconds_per_sample=draw(st.sampled_from(SPEEDS_S)), name="CPU")
            found.append(Fault(at_s=at_s, join=new))
            there += 1
        else:
            victim = draw(st.integers(0, there - 1))
            found.append(Fault(at_s=at_s, kill_rank=victim))
    return ranks, tuple(found)


@pytest.mark.reaches("died", "joined", "a lone survivor of four")
@settings(max_examples=20, deadline=None)
@example("cadence", (4, DEATHS))
@example("async", (4, DEATHS))
@given(st.sampled_from(["cadence", "async"]), comings())
def test_a_sample_counts_once_whoever_comes_and_goes(
    policy: str, drawn: tuple[int, tuple[Fault, ...]]
) -> None:
    ranks, faults = drawn
    sim = run_weighed(policy, ranks, faults)
    if sim.core.aborted is None:
        reach("died" if sim.core.lost else "all lived")
        reach("a lone survivor of four" if sim.core.lost == {1, 2, 3} else "others")
        reach("joined" if max(sim.history.finished) >= ranks else "none joined")
