"""Search for partitions by simulated step time.

The search depends only on the profile, never on a clock, so that all ranks find the
same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain, combinations, pairwise, permutations

from elche.errors import ConfigError
from elche.schedule.actions import loop_placement, v_placement
from elche.schedule.codes import Rows
from elche.schedule.generators.list_scheduling import list_schedule
from elche.schedule.generators.schedules import fixed_orders, fixed_rows
from elche.schedule.planning.partition import (
    Partition,
    ProfileTable,
    costs_of,
    link_bound,
)
from elche.schedule.timing import CostTable, makespan_of, peaks, run_rows

ALL_PARTITIONS = 3_000  # most partitions that are tried exhaustively
_LIST_COST = 4  # cost of a list schedule, in timings of the same size
_TOLERANCE = 1e-9
NEVER = (math.inf, math.inf)

Measure = tuple[float, float]
"""Cost to minimise: bytes missing on the worst rank, then the step's seconds."""


class Evaluator:
    """Simulates step times of partitions under schedules that are cheap to build.

    Attributes:
        actions: number of actions timed so far, as a measure of effort.
    """

    def __init__(self, table: ProfileTable) -> None:
        self.table = table
        self.actions = 0
        self._times: dict[Partition, float] = {}
        self._orders: dict[tuple[int, ...], list[Rows]] = {}

    def step_s(self, partition: Partition) -> float:
        """Seconds of a step; infinite if the partition exceeds the memory."""
        if partition not in self._times:
            self._times[partition] = self._measure(partition)
        return self._times[partition]

    def measure(self, name: str, partition: Partition) -> tuple[float, float]:
        """Worst rank's missing bytes, and step time (s), under a published schedule.

        Raises ConfigError if it is not defined for this number of microbatches.
        """
        costs = CostTable(costs_of(self.table, partition))
        lack, time = self._timed(fixed_rows(name, costs, self.table.count), costs)
        return max(0.0, lack), max(time, link_bound(self.table, partition))

    def ranked(self) -> list[Partition]:
        """All timed partitions that fit the memory, sorted by step time."""
        timed = [each for each, time in self._times.items() if time < math.inf]
        return sorted(timed, key=self.step_s)

    def _measure(self, partition: Partition) -> float:
        table, count = self.table, self.table.count
        if not fits(table, partition):
            return math.inf
        costs = CostTable(costs_of(table, partition))
        timed = [self._timed(rows, costs) for rows in self._rows(costs)]
        best = min((time for lack, time in timed if lack <= 0), default=math.inf)
        if best == math.inf:
            rows = list_schedule(costs, count)
            self.actions += (_LIST_COST - 1) * sum(map(len, rows))
            best = self._timed(rows, costs)[1]
        return max(best, link_bound(table, partition))

    def _timed(self, rows: Rows, costs: CostTable) -> Measure:
        """Bytes missing on the worst rank (negative if none), and the makespan."""
        count = self.table.count
        self.actions += sum(map(len, rows))
        held = peaks(rows, costs, count)
        lack = max(one - limit for one, limit in zip(held, costs.limits, strict=True))
        return lack, makespan_of(rows, run_rows(rows, costs, count), costs, count)

    def _rows(self, costs: CostTable) -> list[Rows]:
        """Action orders that do not depend on costs; none for an unusual placement."""
        placement, ranks = costs.rank_of, costs.num_ranks
        if placement not in self._orders:
            names: tuple[str, ...] = ()
            if placement == loop_placement(ranks):
                whole = ("1f1b",) if self.table.has_whole_backward else ()
                names = ("zb-h1", "zb-h2", *whole)
            elif placement == v_placement(ranks):
                names = ("zb-v",)
            elif placement == loop_placement(ranks, len(placement) // ranks):
                names = ("interleaved-zb",)
            self._orders[placement] = []
            with suppress(ConfigError):  # not defined for this number of microbatches
                self._orders[placement] = [
                    fixed_orders(name, costs, self.table.count)[0][0] for name in names
                ]
        return self._orders[placement]


def fits(table: ProfileTable, partition: Partition) -> bool:
    """True if each device holds its layers and one microbatch of their activations."""
    state = table.held_bytes(table.state, partition)
    activations = table.held_bytes(table.activation, partition)
    return all(
        sum(needed) <= table.memory[device]
        for device, *needed in zip(partition.ranks, state, activations, strict=True)
    )


def descend(
    table: ProfileTable,
    start: Partition,
    least: Measure,
    measure: Callable[[Partition, Measure], Measure | None],
) -> Partition:
    """Moves layers between stages, one at a time, while the measure decreases.

    `measure` receives the least measure so far; None as its result ends the search.
    """
    best, improved = start, True
    while improved:
        improved = False
        for moved in moved_layers(table, best):
            found = measure(moved, least)
            if found is None:
                return best
            if found < (least[0] * (1 - _TOLERANCE), least[1] * (1 - _TOLERANCE)):
                best, least, improved = moved, found, True
                break
    return best


def refine(evaluator: Evaluator, start: Partition, actions: int) -> Partition:
    """Minimises the simulated step time; times about `actions` actions."""
    limit = evaluator.actions + actions

    def measure(moved: Partition, _: Measure) -> Measure | None:
        return None if evaluator.actions >= limit else (0.0, evaluator.step_s(moved))

    return descend(evaluator.table, start, (0.0, evaluator.step_s(start)), measure)


def best_named(
    evaluator: Evaluator,
    name: str,
    starts: Iterable[Partition],
    placements: Collection[tuple[int, ...]],
    actions: int,
) -> tuple[Partition | None, str]:
    """Best partition for a published schedule, or None and the reason.

    Tries the starts, then all partitions if they are few, sorted by a lower bound. Then
    moves layers of the best one. Times about `actions` actions.
    """
    reason, until = "", evaluator.actions + actions

    def measure(partition: Partition, _: Measure) -> Measure | None:
        nonlocal reason
        if evaluator.actions >= until:
            return None
        if not fits(evaluator.table, partition):
            return NEVER
        try:
            return evaluator.measure(name, partition)
        except ConfigError as error:  # not defined for these microbatches and devices
            reason = str(error)
            return NEVER

    table, best, least = evaluator.table, None, NEVER
    every = [each for each in _every(table, placements) if fits(table, each)]
    bounds = {each: least_s(table, each) for each in every}
    for each in chain(starts, sorted(bounds, key=lambda one: bounds[one])):
        if (0.0, bounds.get(each, 0.0)) < least:
            found = measure(each, least) or NEVER
            if found < least:
                best, least = each, found
    if best is None:
        return None, reason
    return descend(table, best, least, measure), ""


def _every(
    table: ProfileTable, placements: Collection[tuple[int, ...]]
) -> Iterator[Partition]:
    """All partitions in the given placements; none if there are too many."""
    devices, layers = len(table.profile.devices), len(table.profile.layers)
    counts = [
        math.perm(devices, len(set(one))) * math.comb(layers - 1, len(one) - 1)
        for one in placements
    ]
    for placement in placements if sum(counts) <= ALL_PARTITIONS else ():
        for ends in combinations(range(1, layers), len(placement) - 1):
            sizes = tuple(b - a for a, b in pairwise((0, *ends, layers)))
            for order in permutations(range(devices), len(set(placement))):
                yield Partition(tuple(order[rank] for rank in placement), sizes)


def least_s(table: ProfileTable, partition: Partition) -> float:
    """Lower bound of the step time of a fitting partition under any schedule."""
    busiest = table.count * max(CostTable(costs_of(table, partition)).work)
    return max(busiest, link_bound(table, partition))


def loads_of(table: ProfileTable, partition: Partition) -> dict[int, float]:
    """Each device's work in a step."""
    bounds = partition.boundaries
    loads = dict.fromkeys(partition.devices, 0.0)
    for stage, device in enumerate(partition.devices):
        loads[device] += table.work(device, bounds[stage], bounds[stage + 1])
    return loads


def moved_layers(table: ProfileTable, partition: Partition) -> Iterator[Partition]:
    """Moves one layer from a stage to another; the stages between shift by one layer.

    Moves from busy devices to idle ones come first.
    """
    sizes, devices = partition.sizes, partition.devices
    load = loads_of(table, partition)

    def promise(pair: tuple[int, ...]) -> tuple[float, int]:
        one, to = pair
        return load[devices[to]] - load[devices[one]], abs(to - one)

    for one, to in sorted(permutations(range(len(sizes)), 2), key=promise):
        if sizes[one] > 1:
            changed = list(sizes)
            changed[one] -= 1
            changed[to] += 1
            yield Partition(devices, tuple(changed))
