"""Partitions timed, balanced and refined by simulation.

What is searched depends on the profile alone, never on a clock, so that all ranks find
the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from elche.schedule.actions import loop_placement, v_placement
from elche.schedule.bounds import MakespanBounds
from elche.schedule.codes import Rows
from elche.schedule.generators.interleaved import interleaved_rows
from elche.schedule.generators.list_scheduling import Rule, list_schedule
from elche.schedule.generators.one_chunk import one_f_one_b_rows, zb_h1_rows, zb_h2_rows
from elche.schedule.generators.schedules import fixed_rows
from elche.schedule.generators.v_shape import zb_v_rows
from elche.schedule.planning.partition import Partition, ProfileTable
from elche.schedule.planning.partition_costs import costs_of, link_bound
from elche.schedule.timing import CostTable, makespan_of, peaks, run_rows

_LEAST_ACTIONS = 500  # `auto` on a short schedule costs as much as on one of these
_LIST_COST = 4  # a list schedule takes about as long as timing four
_TOLERANCE = 1e-9


class Evaluator:
    """Simulated step times of partitions, with schedules that are quickly made.

    Args:
        table: of model and devices.

    Attributes:
        actions: timed so far, as a measure of effort.
    """

    def __init__(self, table: ProfileTable) -> None:
        self.table = table
        self.actions = 0
        self._times: dict[Partition, float] = {}
        self._orders: dict[tuple[int, ...], list[Rows]] = {}

    def step_s(self, partition: Partition) -> float:
        """Seconds of a step; infinite if the memory does not hold it."""
        if partition not in self._times:
            self._times[partition] = self._measure(partition)
        return self._times[partition]

    def measure(self, name: str, partition: Partition) -> tuple[float, float]:
        """Bytes that a published schedule lacks on the worst rank, and its step time.

        Args:
            name: of the schedule.
            partition: in its placement.

        Raises:
            ConfigError: it is not defined for this number of microbatches.
        """
        costs = CostTable(costs_of(self.table, partition))
        count = self.table.count
        rows = fixed_rows(name, costs, count)
        self.actions += sum(map(len, rows))
        held = peaks(rows, costs, count)
        lack = max(one - limit for one, limit in zip(held, costs.limits, strict=True))
        time = makespan_of(rows, run_rows(rows, costs, count), costs, count)
        return max(0.0, lack), max(time, link_bound(self.table, partition))

    def ranked(self) -> list[Partition]:
        """All partitions that were timed and fit the memory, the best first."""
        timed = [each for each, time in self._times.items() if time < math.inf]
        return sorted(timed, key=self.step_s)

    def _measure(self, partition: Partition) -> float:
        table, count = self.table, self.table.count
        if not fits(table, partition):
            return math.inf
        costs = CostTable(costs_of(table, partition))
        best = math.inf
        for rows in self._rows(partition.placement):
            self.actions += sum(map(len, rows))
            held = peaks(rows, costs, count)
            if all(one <= limit for one, limit in zip(held, costs.limits, strict=True)):
                starts = run_rows(rows, costs, count)
                best = min(best, makespan_of(rows, starts, costs, count))
        if best == math.inf:
            rows = list_schedule(costs, count, costs.limits, Rule())
            self.actions += _LIST_COST * sum(map(len, rows))
            starts = run_rows(rows, costs, count)
            best = makespan_of(rows, starts, costs, count)
        return max(best, link_bound(table, partition))

    def _rows(self, placement: tuple[int, ...]) -> list[Rows]:
        """Orders that do not depend on costs; none for an unusual placement."""
        if placement not in self._orders:
            self._orders[placement] = self._make_rows(placement)
        return self._orders[placement]

    def _make_rows(self, placement: tuple[int, ...]) -> list[Rows]:
        count, ranks = self.table.count, max(placement) + 1
        chunks = len(placement) // ranks
        if placement == loop_placement(ranks):
            orders = [zb_h1_rows(ranks, count), zb_h2_rows(ranks, count)]
            if self.table.has_whole_backward:
                orders.append(one_f_one_b_rows(ranks, count))
            return orders
        if placement == v_placement(ranks):
            return [zb_v_rows(ranks, count)]
        in_rounds = count % max(1, count // ranks) == 0
        if in_rounds and placement == loop_placement(ranks, chunks):
            return [interleaved_rows(ranks, chunks, count, zero_bubble=True)]
        return []


def fits(table: ProfileTable, partition: Partition) -> bool:
    """True if each device holds its layers and one microbatch of their activations."""
    bounds = partition.boundaries
    needed = table.state_bytes(partition)
    for stage, rank in enumerate(partition.placement):
        needed[rank] += (
            table.activation[bounds[stage + 1]] - table.activation[bounds[stage]]
        )
    return all(
        each <= table.memory[device]
        for each, device in zip(needed, partition.ranks, strict=True)
    )


def refine(evaluator: Evaluator, start: Partition, actions: int) -> Partition:
    """Moves layers between stages while the simulated step gets shorter.

    Args:
        evaluator: times partitions.
        start: a partition that fits.
        actions: to time at most, roughly.

    Returns:
        A partition at least as good as `start`.
    """
    best, best_s = start, evaluator.step_s(start)
    limit = evaluator.actions + actions
    improved = True
    while improved:
        improved = False
        for moved in moved_layers(evaluator.table, best):
            if evaluator.actions >= limit:
                return best
            time = evaluator.step_s(moved)
            if time < best_s * (1 - _TOLERANCE):
                best, best_s, improved = moved, time, True
                break
    return best


def polish(
    table: ProfileTable,
    start: Partition,
    measure: Callable[[Partition], float],
    actions: int,
) -> Partition:
    """Moves layers between stages while a dear measure of the step gets shorter.

    What cannot be better, by the bounds of its costs, is not measured.

    Args:
        table: of model and devices.
        start: a partition that fits.
        measure: seconds of a step.
        actions: in all schedules that are measured, roughly.

    Returns:
        A partition at least as good as `start`.
    """
    best, best_s = start, measure(start)
    improved = True
    while improved:
        improved = False
        for moved in moved_layers(table, best):
            if not fits(table, moved) or _least_s(table, moved) >= best_s:
                continue
            if actions <= 0:
                return best
            actions -= max(3 * len(moved.sizes) * table.count, _LEAST_ACTIONS)
            time = measure(moved)
            if time < best_s * (1 - _TOLERANCE):
                best, best_s, improved = moved, time, True
                break
    return best


def _least_s(table: ProfileTable, partition: Partition) -> float:
    """A step time that no schedule of a partition beats."""
    costs = costs_of(table, partition)
    bounds = MakespanBounds(CostTable(costs), table.count, costs.limits)
    return max(bounds.least, link_bound(table, partition))


def balanced(table: ProfileTable, start: Partition) -> Partition:
    """Moves layers between stages while the busiest device's work gets less.

    For several stages per device, where the exact partition balances the stages and
    not the devices.

    Args:
        table: of model and devices.
        start: a partition that fits.

    Returns:
        A partition that fits, in the placement of `start`.
    """
    best, improved = start, True
    while improved:
        options = [each for each in moved_layers(table, best) if fits(table, each)]
        better = min(options, key=lambda each: _imbalance(table, each), default=best)
        most, squares = _imbalance(table, best)
        improved = _imbalance(table, better) < (
            most * (1 - _TOLERANCE),
            squares * (1 - _TOLERANCE),
        )
        if improved:
            best = better
    return best


def _imbalance(table: ProfileTable, partition: Partition) -> tuple[float, float]:
    loads = loads_of(table, partition).values()
    return max(loads), sum(each * each for each in loads)


def loads_of(table: ProfileTable, partition: Partition) -> dict[int, float]:
    """Each device's work in a step."""
    bounds = partition.boundaries
    loads = dict.fromkeys(partition.devices, 0.0)
    for stage, device in enumerate(partition.devices):
        loads[device] += table.work(device, bounds[stage], bounds[stage + 1])
    return loads


def moved_layers(table: ProfileTable, partition: Partition) -> Iterator[Partition]:
    """One layer from a stage to another; the stages between pass theirs on.

    From busy devices to idle ones first.
    """
    sizes, load = partition.sizes, loads_of(table, partition)
    stages = range(len(sizes))
    pairs = [(one, to) for one in stages for to in stages if one != to]
    devices = partition.devices
    pairs.sort(
        key=lambda pair: (
            load[devices[pair[1]]] - load[devices[pair[0]]],
            abs(pair[1] - pair[0]),
        )
    )
    for one, to in pairs:
        if sizes[one] > 1:
            changed = list(sizes)
            changed[one] -= 1
            changed[to] += 1
            yield Partition(devices, tuple(changed))
