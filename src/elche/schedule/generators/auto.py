"""`auto`: the schedule of least makespan for measured costs and memory limits.

The search times every published schedule that suits the placement and the memory, then
list schedules. It varies the best of them: every W moved into gaps, or B in place of I
and W on stages where B is cheaper. It improves the best result along its
critical path, and stops when the busiest rank never waits. The effort depends on the
number of actions, never on a clock, so that all ranks find the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.schedule.actions import (
    Schedule,
    check_microbatches,
    loop_placement,
    v_placement,
)
from elche.schedule.codes import B, I, Rows, W, decode, spread
from elche.schedule.costs import PipelineCosts, RankTimes, equal_costs, renumbered
from elche.schedule.generators.critical_path import improve
from elche.schedule.generators.list_scheduling import list_schedule
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    fits_placement,
    fixed_orders,
)
from elche.schedule.generators.v_shape import V_HALF_STEPS, block_rows
from elche.schedule.timing import CostTable, makespan_of, peaks, run_rows

EXTRA_ACTIONS = 150_000  # budget of actions beyond the published schedules
MAX_EVALUATIONS = 60
IMPROVED_ACTIONS = 10_000  # budget of actions of the local improvement
_TOLERANCE = 1e-9


def auto_schedule(costs: PipelineCosts, num_microbatches: int) -> Schedule:
    """The schedule of least makespan that fits the memory, compute only.

    Raises:
        ConfigError: no microbatches, or a rank's memory is too small for one microbatch
            of its stages.
    """
    check_microbatches(num_microbatches)
    search = _Search(costs, num_microbatches)
    search.run(math.inf)
    return search.result()


def auto_placed(
    times: RankTimes,
    num_ranks: int,
    num_microbatches: int,
    memory: float | None = None,
    most_stages: int = 2,
) -> tuple[Schedule, PipelineCosts]:
    """Schedule of least makespan on equal ranks, among several placements.

    Always tries two stages per rank, in loop and in V placement. More stages, up to
    `most_stages`, shorten bubbles but send more messages. `memory` limits each rank's
    units of memory; None means no limit.

    Returns:
        The schedule and the costs in its placement.

    Raises:
        ConfigError: no ranks; others as `auto_schedule`.
    """
    check_microbatches(num_microbatches)
    check_whole("the number of ranks", num_ranks, 1)
    most = max(2, most_stages)
    loops = [loop_placement(num_ranks, each) for each in (*range(2, most + 1), 1)]
    searches: list[_Search] = []
    for placement in (v_placement(num_ranks), *loops):
        costs = equal_costs(times, placement, num_ranks, memory)
        search = _Search(costs, num_microbatches)
        search.run(min((one.makespan for one in searches), default=math.inf))
        searches.append(search)
    best = min(searches, key=lambda one: one.makespan)
    return best.result(), best.given


class _Search:
    """Tracks the best of all schedules tried for one placement."""

    def __init__(self, given: PipelineCosts, count: int) -> None:
        self.given, self.count = given, count
        self.costs, self.order = renumbered(given)
        self.table = CostTable(self.costs)
        self.limits = self.costs.limits
        self.bound = count * max(self.table.work)
        names = [name for name in FIXED_SCHEDULES if fits_placement(name, self.costs)]
        self.published = sorted(names, key=_promise)
        self.makespan = math.inf
        self.name = ""
        self.rows: Rows = []
        self.left = EXTRA_ACTIONS
        self._check_memory()

    def run(self, known: float) -> None:
        """Searches, unless the bound shows that no schedule beats `known`."""
        if self.bound >= known:
            return
        for name in self.published:
            if self._is_optimal():
                return
            try:
                orders = fixed_orders(name, self.table, self.count)
            except ConfigError:
                continue  # not defined for this number of microbatches
            for rows, held in orders:
                if held is None:
                    self._offer(name, rows)
                else:
                    self._place(name, rows, held)
        self.left = EXTRA_ACTIONS
        for _ in self._variants():
            if self.left < 0 or self._is_optimal():
                break
        self._merge()
        evaluations = IMPROVED_ACTIONS // sum(map(len, self.rows))
        if not self._is_optimal() and evaluations:
            most = min(evaluations, MAX_EVALUATIONS)
            rows = improve(self.rows, self.table, self.count, most)
            self._offer(self.name, rows)

    def result(self) -> Schedule:
        """Returns the best schedule."""
        rows = spread(self.rows, self.order, self.given.num_ranks)
        return decode(f"auto ({self.name})", rows, self.given.placement, self.count)

    def _check_memory(self) -> None:
        stages = list(zip(self.costs.stages, self.costs.placement, strict=True))
        for rank, limit in enumerate(self.limits):
            needed = sum(one.activation for one, holder in stages if holder == rank)
            if needed > limit + _TOLERANCE:
                raise ConfigError(
                    f"rank {self.order[rank]} needs {needed:g} units of activation "
                    "memory for one microbatch of its stages, its limit is "
                    f"{limit:g}; give it fewer or smaller stages, or smaller "
                    "microbatches"
                )

    def _offer(self, name: str, rows: Rows) -> None:
        """Keeps a schedule if it fits the memory and is the shortest so far."""
        if not rows:
            return
        held = peaks(rows, self.table, self.count)
        pairs = zip(held, self.limits, strict=True)
        if any(peak > limit + _TOLERANCE for peak, limit in pairs):
            return
        starts = run_rows(rows, self.table, self.count)
        time = makespan_of(rows, starts, self.table, self.count)
        if time < self.makespan * (1 - _TOLERANCE):
            self.makespan, self.name, self.rows = time, name, rows

    def _place(
        self, name: str, orders: Rows, limits: Sequence[float] | None = None
    ) -> None:
        """Moves every W of a schedule into gaps; keeps the result if it is the best."""
        self.left -= sum(map(len, orders))
        table, most = self.table, self.makespan
        rows = list_schedule(table, self.count, most, orders=orders, limits=limits)
        self._offer(name, rows)

    def _list(
        self, patience: float = 1.0, merged: frozenset[int] = frozenset()
    ) -> None:
        """Builds a list schedule, and keeps it if it is the best so far."""
        self.left -= 3 * self.table.num_stages * self.count
        rows = list_schedule(self.table, self.count, self.makespan, patience, merged)
        self._offer("list", rows)

    def _is_optimal(self) -> bool:
        return self.makespan <= self.bound * (1 + _TOLERANCE)

    def _variants(self) -> Iterator[None]:
        """Tries unpublished schedules, one per iteration."""
        ranks = self.table.num_ranks
        for patience in (1.0, 0.5):
            self._list(patience)
            yield
        if self.costs.placement == v_placement(ranks):
            self._place("v block", block_rows(ranks, self.count, V_HALF_STEPS))
            yield
        if self.rows:
            self._place(self.name, self.rows)

    def _merge(self) -> None:
        """Tries B in place of I and W on stages with a cheaper B."""
        cheaper = [
            stage
            for stage, one in enumerate(self.costs.stages)
            if one.full_backward < one.input_gradient + one.weight_gradient
        ]
        if not cheaper:
            return
        everywhere = frozenset(cheaper)
        self._offer(self.name, merged(self.rows, everywhere, self.count))
        self._list(merged=everywhere)
        tries = EXTRA_ACTIONS // sum(map(len, self.rows))
        for stage in cheaper[:tries]:
            self._offer(self.name, merged(self.rows, {stage}, self.count))


def merged(rows: Rows, stages: frozenset[int] | set[int], count: int) -> Rows:
    """Replaces I by B, and drops W, on the given stages."""

    def is_merged(code: int) -> bool:
        return (code >> 3) // count in stages

    return [
        [
            code - I + B if code & 7 == I and is_merged(code) else code
            for code in row
            if code & 7 != W or not is_merged(code)
        ]
        for row in rows
    ]


def _promise(name: str) -> int:
    order = ("zb-v", "interleaved-zb", "zb-h1", "zb-h2")
    return order.index(name) if name in order else len(order)
