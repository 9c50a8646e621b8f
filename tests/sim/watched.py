"""A simulation that notes what it came to, and in which ranks die inside reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elche.coordination.protocol.events import EpochLeft
from elche.sim.cluster import Cluster, Fault
from elche.sim.engine import Collective
from elche.sim.history import THROTTLE
from elche.sim.simulation import Simulation, Watch
from tests.harness.reached import reach

WAIT = f"wait: {THROTTLE}"
HANDED_OVER = {
    "result": "results taken over",
    "sums": "results taken over",
    "state": "models handed over",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank dies while a reduction runs; at a drawn time that hardly ever happens.

    Attributes:
        reduction: which of the run's, in the order in which they begin.
        place: of the rank among those who take part, counted round.
        part: of the time until the first rank has the result; above 1, so much of the
            time from there until the last one has it.
    """

    reduction: int
    place: int
    part: float


class WatchedSimulation(Simulation):
    """Notes the states of `tests.harness.reached` as it comes to them.

    Args:
        cluster: what is simulated.
        watch: what is done beside.
        deaths: inside reductions, beside the cluster's faults.
    """

    def __init__(
        self, cluster: Cluster, watch: Watch, deaths: Sequence[Death] = ()
    ) -> None:
        super().__init__(cluster, watch)
        self._deaths = deaths
        self._reductions = 0
        self._entered: dict[tuple[Any, ...], int] = {}
        self._arrive = self.engine.arrive
        self.engine.arrive = self._arrives  # type: ignore[method-assign]

    def note(self) -> None:
        """The run is over: what the history tells of it."""
        history = self.history
        for rank, sums in history.ranks.items():
            if sums.batches:
                reach("deaths", sums.has_died)
                reach("joins", rank >= self.cluster.world_size)
            reach("late adoptions", sums.most_lag_batches > 0)
        reach("waits for the slowest", sum(WAIT in each.name for each in history.spans))
        left = sum(isinstance(one, EpochLeft) for _, one in self.messages)
        reach("epochs left early", left)
        reach("changes of policy", max(0, len(history.phases) - 1))
        reach("commits", sum(map(len, history.committed.values())))

    def _arrives(
        self,
        key: tuple[Any, ...],
        rank: int,
        new: Callable[[], Collective],
        ready_s: float | None = None,
    ) -> Collective:
        collective = self._arrive(key, rank, new, ready_s)
        kind = key[0]
        is_complete = collective.arrived.keys() == collective.members
        if kind in HANDED_OVER and is_complete:
            reach(HANDED_OVER[kind])
            reach("sources other than the first", key[3] > min(collective.members))
        elif kind in ("window", "step"):
            _, run, generation, *what = key
            part = run, *what
            self._entered.setdefault((rank, *part), generation)
            if is_complete and not collective.failed:
                began = [
                    self._entered[(member, *part)] for member in collective.members
                ]
                reach("redone reductions", min(began) < generation)
                self._begins(collective)
        return collective

    def _begins(self, collective: Collective) -> None:
        """All have come; whoever is to die in this reduction will."""
        members, now_s = sorted(collective.members), self.engine.now_s
        ends_s = collective.done_s.values()
        first_s, last_s = min(ends_s), max(ends_s)
        for death in self._deaths:
            if death.reduction == self._reductions:
                at_s = now_s + min(1.0, death.part) * (first_s - now_s)
                at_s += max(0.0, death.part - 1.0) * (last_s - first_s)
                rank = members[death.place % len(members)]
                self.engine.at(at_s, self._happen, Fault(at_s=at_s, kill_rank=rank))
        self._reductions += 1
        reach("reductions", len(members) > 1)
