"""Epochs that are cut, to pause or for good: everybody hears the same rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import EpochCut, Event
from elche.coordination.protocol.instructions import BeginEpoch, EndEpoch, Instruction
from elche.sim.cluster import Break, Cluster
from elche.sim.simulation import Simulation, Watch
from tests.harness.reached import reach
from tests.sim.checks import MOST_HAPPENINGS
from tests.sim.strategies import clusters


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank asks for a cut, some time after its epoch has begun."""

    rank: int
    after_s: float
    is_end: bool


class CutSimulation(Simulation):
    """A run of one epoch, in which ranks ask for cuts."""

    def __init__(self, cluster: Cluster, cuts: Sequence[Cut]) -> None:
        watch = Watch(checks=True, details=True, most_happenings=MOST_HAPPENINGS)
        super().__init__(cluster, watch)
        self.cuts = cuts
        self.heard: list[EpochCut] = []
        self.ends: dict[int, EndEpoch] = {}
        self._is_over = False

    def hear(self, event: Event) -> None:
        if isinstance(event, EpochCut) and not self._is_over:
            self.heard.append(event)
        super().hear(event)

    def _note_groups(self, told: list[Instruction]) -> None:
        super()._note_groups(told)
        self._is_over |= any(isinstance(each, EndEpoch) for each in told)

    def take(self, rank: int) -> Instruction | None:
        instruction = super().take(rank)
        if isinstance(instruction, BeginEpoch):
            for cut in self.cuts:
                if cut.rank == rank:
                    asked = EpochCut(rank=rank, epoch=0, is_end=cut.is_end)
                    self.engine.at(self.engine.now_s + cut.after_s, self.send, asked)
        if isinstance(instruction, EndEpoch):
            assert rank not in self.ends
            self.ends[rank] = instruction
        return instruction


@pytest.mark.reaches("pauses or ends")
@pytest.mark.parametrize("is_ends", [(False,), (True,), (False, True)])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "auto"])
@given(st.data())
@settings(max_examples=25)
def test_a_cut_leaves_what_nobody_has_trained_on(
    policy: str, is_ends: tuple[bool, ...], data: st.DataObject
) -> None:
    """And the run goes on with it, unless one rank is to end."""
    cluster = data.draw(clusters(policy))
    # A break that is never come to: the account expects no whole epoch then.
    never = (Break(rank=0, epoch=0, batches=10**9),)
    cluster = replace(cluster, run=replace(cluster.run, epochs=1), breaks=never)
    ranks, times_s = st.integers(0, cluster.world_size - 1), st.floats(0.0, 0.5)
    cuts = [Cut(data.draw(ranks), data.draw(times_s), each) for each in is_ends]
    sim = CutSimulation(cluster, cuts)
    history = sim.run()
    assert not history.aborts
    assert history.finished == sim.ends.keys() == set(range(cluster.world_size))
    (left,) = {end.left for end in sim.ends.values()}
    (is_early,) = {end.is_early for end in sim.ends.values()}
    asked = {cut.is_end for cut in sim.heard}
    assert is_early == (bool(left) and True in asked)
    assert bool(left) <= bool(asked)
    sizes = BatchSizes(cluster.run.sizes)
    trained = [
        sizes.position_of(batch) + at
        for _, batch, start, stop in history.trained[0, 0]
        for at in range(start, stop)
    ]
    rest = [at for start, stop in left for at in range(start, stop)]
    assert sorted(trained + rest) == list(range(sizes.num_samples))
    reach("pauses or ends", bool(left))
