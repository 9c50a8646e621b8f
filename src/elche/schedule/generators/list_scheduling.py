"""Schedules from costs and memory limits, by list scheduling.

Each rank that becomes free runs a ready action, chosen by a rule: backwards before
forwards, weight gradients in the gaps. This is the idea of the zero-bubble paper's
heuristic (Qi et al. 2024, section 3.1). Unlike there, a rank may hold any number of
stages, in any placement, and the objective is the makespan.

No choice can deadlock on memory: a forward must leave room for its microbatch in the
later stages of its rank. So the oldest unfinished microbatch can always proceed. A
rank's memory holds only two kinds of microbatches: those of earlier stages, which left
that room, and those whose W can run and free their memory.

The search drops a schedule once a rank's work and waits so far exceed a known makespan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from elche.schedule.codes import B, F, I, Rows, W
from elche.schedule.timing import CostTable

_TOLERANCE = 1e-9

Choice = Callable[[int, float], tuple[int, float, bool]]
"""Function of rank and time. Returns the code to run, or -1; the time at which the next
code is ready (infinite if unknown); and True if a code only waits for memory.
"""


_Target = tuple[list[float], int, float, int]
"""Destination of a code's result: the ready times, the offset of the waiting code's
index, the link time, and the waiting code's rank."""


class _ListScheduler:
    """Schedule under construction; see `list_schedule`."""

    def __init__(
        self,
        table: CostTable,
        count: int,
        limits: Sequence[float],
        merged: frozenset[int],
    ) -> None:
        stages = table.num_stages
        self.table, self.count, self.limits = table, count, limits
        self.rows: Rows = [[] for _ in range(table.num_ranks)]
        self.held = [0.0] * table.num_ranks
        self.weights: list[deque[int]] = [deque() for _ in self.rows]
        self.forward_at = [0.0] * count + [-1.0] * ((stages - 1) * count)
        self.backward_at = [-1.0] * (stages * count)
        self.next_forward = [0] * stages
        self.next_backward = [0] * stages
        self.backward_kind = [B if s in merged else I for s in range(stages)]
        self.stages_of: list[list[int]] = [[] for _ in self.rows]
        for stage, rank in enumerate(table.rank_of):
            self.stages_of[rank].append(stage)
        # Highest memory level at which each stage's forward may begin.
        self.room = [0.0] * stages
        for rank, held in enumerate(self.stages_of):
            room = limits[rank] + _TOLERANCE
            for stage in reversed(held):
                self.room[stage] = room + table.releases[stage * 8 + F]
                room += table.releases[stage * 8 + F]

    def run(self, choose: Choice, most: float, patience: float) -> Rows:
        """Runs all ranks until no action is left, or the step takes `most`."""
        heap = [(0.0, rank) for rank in range(len(self.rows))]
        wake_at = [0.0] * len(heap)
        most *= 1 - _TOLERANCE
        slack = [most - self.count * work for work in self.table.work]
        execute = self._executor(heap, wake_at, slack)
        weights, count, durations = self.weights, self.count, self.table.durations
        while heap:
            now, rank = heap[0]
            if now != wake_at[rank]:
                heappop(heap)
                continue  # superseded by an earlier time
            code, ready_at, blocked = choose(rank, now)
            if code < 0 and weights[rank]:
                length = durations[(weights[rank][0] >> 3) // count * 8 + W]
                if blocked or ready_at - now >= patience * length:
                    code = weights[rank].popleft()
            if code >= 0:
                if not execute(rank, code):
                    return []
                continue
            wake_at[rank] = ready_at
            if ready_at < math.inf:
                heapreplace(heap, (ready_at, rank))
            else:
                heappop(heap)
        return self.rows

    def _executor(
        self, heap: list[tuple[float, int]], wake_at: list[float], slack: list[float]
    ) -> Callable[[int, int], bool]:
        """Returns a function that runs a code on a rank; False if the rank is too late.

        `wake_at` has the valid times in the heap. `slack` has the time that each rank
        may still wait to beat the known makespan.
        """
        count, rows, held, weights = self.count, self.rows, self.held, self.weights
        durations, releases = self.table.durations, self.table.releases
        forward_at, backward_at = self.forward_at, self.backward_at
        next_forward, next_backward = self.next_forward, self.next_backward
        targets = self._targets()
        free_at = [0.0] * len(heap)

        def execute(rank: int, code: int) -> bool:
            index, kind = code >> 3, code & 7
            stage = index // count
            # The rank may have waited for a better code; that does not delay this code.
            end = free_at[rank]
            if kind != W:
                at = backward_at[index] if kind else forward_at[index]
                if at > end:
                    slack[rank] -= at - end
                    if slack[rank] <= 0:
                        return False
                    end = at
            end += durations[stage * 8 + kind]
            rows[rank].append(code)
            held[rank] -= releases[stage * 8 + kind]
            free_at[rank] = wake_at[rank] = end
            heapreplace(heap, (end, rank))
            if kind == F:
                next_forward[stage] += 1
            elif kind != W:
                next_backward[stage] += 1
                if kind == I:
                    weights[rank].append(code - I + W)
            target = targets[stage * 8 + kind]
            if target is not None:
                arrivals, shift, link, other = target
                at = arrivals[index + shift] = end + link
                if at < wake_at[other] > free_at[other]:
                    wake_at[other] = at = max(at, free_at[other])
                    heappush(heap, (at, other))
            return True

        return execute

    def _targets(self) -> list[_Target | None]:
        """Destination of each code's result, by code; None for a code without one."""
        count, forward_at, backward_at = self.count, self.forward_at, self.backward_at
        links, rank_of = self.table.links, self.table.rank_of
        targets: list[_Target | None] = [None for _ in self.table.durations]
        for stage, rank in enumerate(rank_of):
            if stage:
                before = backward_at, -count, links[stage - 1], rank_of[stage - 1]
                targets[stage * 8 + I] = targets[stage * 8 + B] = before
                after = forward_at, count, links[stage - 1], rank
                targets[(stage - 1) * 8 + F] = after
        targets[(len(rank_of) - 1) * 8 + F] = backward_at, 0, 0.0, rank_of[-1]
        return targets

    def by_rule(self) -> Choice:
        """Returns a `Choice` that applies the rule to all stages of a rank."""
        count, held, room = self.count, self.held, self.room
        forward_at, backward_at = self.forward_at, self.backward_at
        next_forward, next_backward = self.next_forward, self.next_backward
        kinds = self.backward_kind
        deep = [stages[::-1] for stages in self.stages_of]

        def choose(rank: int, now: float) -> tuple[int, float, bool]:
            ready_at = math.inf
            for stage in deep[rank]:
                each = next_backward[stage]
                if each < count:
                    at = backward_at[stage * count + each]
                    if at < 0:
                        continue
                    if at > now:
                        if at < ready_at:
                            ready_at = at
                    else:
                        return (stage * count + each) * 8 + kinds[stage], now, False
            blocked = False
            level = held[rank]
            for stage in deep[rank]:
                each = next_forward[stage]
                if each < count:
                    at = forward_at[stage * count + each]
                    if at < 0:
                        continue
                    if level > room[stage]:
                        blocked = blocked or at <= now
                    elif at <= now:
                        return (stage * count + each) * 8 + F, now, False
                    elif at < ready_at:
                        ready_at = at
            return -1, ready_at, blocked

        return choose

    def in_order(self, orders: Rows) -> Choice:
        """Returns a `Choice` that follows each rank's given order."""
        count, held, weights = self.count, self.held, self.weights
        forward_at, backward_at = self.forward_at, self.backward_at
        releases = self.table.releases
        heads = [[code for code in row if code & 7 != W] for row in orders]
        lengths = [len(head) for head in heads]
        positions = [0] * len(heads)
        limit = [each + _TOLERANCE for each in self.limits]

        def choose(rank: int, now: float) -> tuple[int, float, bool]:
            position = positions[rank]
            if position == lengths[rank]:
                return -1, math.inf, False
            code = heads[rank][position]
            index = code >> 3
            at = (backward_at if code & 7 else forward_at)[index]
            if at < 0:
                return -1, math.inf, False
            if at > now:
                return -1, at, False
            if code & 7 == F and weights[rank]:
                taken = -releases[index // count * 8 + F]
                if held[rank] + taken > limit[rank]:
                    return -1, math.inf, True
            positions[rank] = position + 1
            return code, now, False

        return choose


def list_schedule(
    table: CostTable,
    count: int,
    most: float = math.inf,
    patience: float = 1.0,
    merged: frozenset[int] = frozenset(),
    orders: Rows | None = None,
    limits: Sequence[float] | None = None,
) -> Rows:
    """Builds a schedule of all actions by a rule, or in a given order.

    With a given order of F, I and B only W is placed: into long enough waits, and
    before a forward that needs its memory. If the order itself needs more memory, the
    result exceeds the limits.

    Args:
        table: the costs.
        count: number of microbatches.
        most: known makespan to beat.
        patience: W may fill a known wait of at least this fraction of its duration.
        merged: stages that run B in place of I and W.
        orders: codes of each rank in order, W ignored; None orders by the rule.
        limits: memory limit of each rank, at least one microbatch of its stages; None
            means the limits of the costs.

    Returns:
        Codes of each rank; empty if the schedule would take `most` or longer.
    """
    limits = table.limits if limits is None else limits
    scheduler = _ListScheduler(table, count, limits, merged)
    choice = scheduler.by_rule() if orders is None else scheduler.in_order(orders)
    return scheduler.run(choice, most, patience)
