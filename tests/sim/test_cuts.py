"""Epochs that are cut, to pause or for good: all hear the same rest, and go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.epoch_parts import EpochRest
from elche.coordination.protocol.events import EpochCut
from elche.coordination.protocol.instructions import BeginEpoch, EndEpoch, Instruction
from elche.sim.cluster import Break, Cluster
from elche.sim.simulation import Simulation
from tests.harness.reached import reach
from tests.sim.checks import CHECKED, positions, trained_positions
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
        super().__init__(cluster, CHECKED)
        self.cuts = cuts
        self.ends: dict[int, list[EndEpoch]] = defaultdict(list)

    def take(self, rank: int) -> Instruction | None:
        instruction = super().take(rank)
        if isinstance(instruction, BeginEpoch) and not self.ends[rank]:
            for cut in self.cuts:
                if cut.rank == rank:
                    asked = EpochCut(rank=rank, epoch=0, is_end=cut.is_end)
                    self.engine.at(self.engine.now_s + cut.after_s, self.send, asked)
        if isinstance(instruction, EndEpoch):
            self.ends[rank].append(instruction)
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
    assert history.finished == set(range(cluster.world_size))
    ends = sim.ends[0]
    told = [[(one.left, one.is_early) for one in each] for each in sim.ends.values()]
    assert told == [told[0]] * cluster.world_size
    assert all(one.left and not one.is_early for one in ends[:-1])
    left, is_early = ends[-1].left, ends[-1].is_early
    assert is_early == bool(left) <= (True in is_ends)
    own = policy == "auto"  # which cuts it for windows
    assert len(ends) <= 1 + is_ends.count(False) + own
    rest = EpochRest.whole(BatchSizes(cluster.run.sizes))
    for one in ends:
        rest = rest.after(one)
    trained = trained_positions(history, 0, 0)
    trained.update(at for part in rest.left.ranges for at in range(*part))
    assert trained == positions(cluster.run.sizes)
    reach("pauses or ends", bool(ends[0].left))
