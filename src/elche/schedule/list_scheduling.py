"""Schedules from costs and memory limits, by list scheduling.

Each rank that becomes free runs what is ready, by a rule: backwards before forwards,
weight gradients in the gaps (the idea of the zero-bubble paper's heuristic, Qi et al.
2024, section 3.1). Unlike there, any number of stages may stand on a rank, in any
placement, and what is minimised is the makespan.

No choice can deadlock on memory: a forward may only take what leaves room for the same
microbatch in the later stages of its rank. Then the oldest unfinished microbatch always
finds its place: in a rank's memory there are only microbatches of earlier stages, which
left that room, and those whose W can run and free it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from elche.schedule.codes import B, F, I, Rows, W
from elche.schedule.timing import CostTable

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Rule:
    """What a free rank prefers.

    Attributes:
        patience: W fills a wait that is known to last at least this share of W.
        oldest_first: the backward of the oldest microbatch first, else that of the
            deepest stage. Differs only with several stages per rank.
        deep_first: the forward of the deepest stage first, else the shallowest.
        merged: stages that run B in place of I and W.
    """

    patience: float = 1.0
    oldest_first: bool = False
    deep_first: bool = True
    merged: frozenset[int] = frozenset()


class ListScheduler:
    """Builds one schedule; use `list_schedule` or `place_weights`.

    Args:
        table: the costs.
        count: microbatches.
        limits: memory of each rank; at least one microbatch of its stages.
        rule: what a free rank prefers.
    """

    def __init__(
        self, table: CostTable, count: int, limits: Sequence[float], rule: Rule
    ) -> None:
        stages = table.num_stages
        self.table, self.count, self.rule = table, count, rule
        self.rows: Rows = [[] for _ in range(table.num_ranks)]
        self.held = [0.0] * table.num_ranks
        self.weights: list[deque[int]] = [deque() for _ in self.rows]
        self.forward_at = [0.0] * count + [-1.0] * ((stages - 1) * count)
        self.backward_at = [-1.0] * (stages * count)
        self.next_forward = [0] * stages
        self.next_backward = [0] * stages
        self.backward_kind = [B if s in rule.merged else I for s in range(stages)]
        self.stages_of: list[list[int]] = [[] for _ in self.rows]
        for stage, rank in enumerate(table.rank_of):
            self.stages_of[rank].append(stage)
        # Highest level at which each stage's forward may begin.
        self.room = [0.0] * stages
        for rank, held in enumerate(self.stages_of):
            room = limits[rank] + _TOLERANCE
            for stage in reversed(held):
                self.room[stage] = room + table.releases[stage * 8 + F]
                room += table.releases[stage * 8 + F]

    def run(self, choose: Callable[[int, float], tuple[int, float, bool]]) -> Rows:
        """Runs all ranks until nothing is left.

        Args:
            choose: for a rank and a time: the code to run, or -1; else when one will
                be ready (infinite if unknown), and whether one waits for memory only.
        """
        heap = [(0.0, rank) for rank in range(len(self.rows))]
        weights, table, count = self.weights, self.table, self.count
        durations, releases, links = table.durations, table.releases, table.links
        forward_at, backward_at = self.forward_at, self.backward_at
        rank_of, last = table.rank_of, table.num_stages - 1
        free_at = [0.0] * len(heap)
        wake_at = [0.0] * len(heap)
        while heap:
            now, rank = heappop(heap)
            if now != wake_at[rank]:
                continue  # superseded by an earlier time
            code, ready_at, blocked = choose(rank, now)
            if code < 0 and weights[rank]:
                length = durations[(weights[rank][0] >> 3) // count * 8 + W]
                if blocked or ready_at - now >= self.rule.patience * length:
                    code = weights[rank].popleft()
            if code < 0:
                wake_at[rank] = ready_at
                if ready_at < math.inf:
                    heappush(heap, (ready_at, rank))
                continue
            index, kind = code >> 3, code & 7
            stage = index // count
            self.rows[rank].append(code)
            self.held[rank] -= releases[stage * 8 + kind]
            end = now + durations[stage * 8 + kind]
            free_at[rank] = wake_at[rank] = end
            heappush(heap, (end, rank))
            if kind == W:
                continue
            if kind == F:
                self.next_forward[stage] += 1
                if stage == last:
                    backward_at[index] = end
                    continue
                other = rank_of[stage + 1]
                at = forward_at[index + count] = end + links[stage]
            else:
                self.next_backward[stage] += 1
                if kind == I:
                    weights[rank].append(code - I + W)
                if stage == 0:
                    continue
                other = rank_of[stage - 1]
                at = backward_at[index - count] = end + links[stage - 1]
            if at < wake_at[other] > free_at[other]:
                at = max(at, free_at[other])
                wake_at[other] = at
                heappush(heap, (at, other))
        return self.rows

    def by_rule(self, rank: int, now: float) -> tuple[int, float, bool]:
        """Chooses freely among the stages of a rank."""
        count, rule = self.count, self.rule
        ready_at = math.inf
        best, best_key = -1, math.inf
        for stage in reversed(self.stages_of[rank]):
            each = self.next_backward[stage]
            if each == count:
                continue
            at = self.backward_at[stage * count + each]
            if at < 0:
                continue
            if at > now:
                ready_at = min(ready_at, at)
            elif not rule.oldest_first:
                return self._backward(stage, each), now, False
            elif each < best_key:
                best, best_key = self._backward(stage, each), each
        if best >= 0:
            return best, now, False
        blocked = False
        held = self.stages_of[rank]
        for stage in reversed(held) if rule.deep_first else held:
            each = self.next_forward[stage]
            if each == count:
                continue
            at = self.forward_at[stage * count + each]
            if at < 0:
                continue
            if self.held[rank] > self.room[stage]:
                blocked = blocked or at <= now
            elif at <= now:
                return (stage * count + each) * 8 + F, now, False
            else:
                ready_at = min(ready_at, at)
        return -1, ready_at, blocked

    def _backward(self, stage: int, each: int) -> int:
        return (stage * self.count + each) * 8 + self.backward_kind[stage]


def list_schedule(
    table: CostTable, count: int, limits: Sequence[float], rule: Rule
) -> Rows:
    """Schedules everything by a rule.

    Args:
        table: the costs.
        count: microbatches.
        limits: memory of each rank; at least one microbatch of all of its stages.
        rule: what a free rank prefers.
    """
    scheduler = ListScheduler(table, count, limits, rule)
    return scheduler.run(scheduler.by_rule)


def place_weights(
    orders: Rows, table: CostTable, count: int, limits: Sequence[float]
) -> Rows:
    """Keeps the order of F, I and B of each rank, and puts every W where it fits best.

    W runs in waits that are long enough, and where a forward needs its memory.

    Args:
        orders: codes of each rank; the W among them are dropped.
        table: the costs.
        count: microbatches.
        limits: memory of each rank. Where an order needs more, it gets more.
    """
    scheduler = ListScheduler(table, count, limits, Rule())
    heads = [[code for code in row if code & 7 != W] for row in orders]
    positions = [0] * len(heads)
    limit = [each + _TOLERANCE for each in limits]

    def next_in_order(rank: int, now: float) -> tuple[int, float, bool]:
        if positions[rank] == len(heads[rank]):
            return -1, math.inf, False
        code = heads[rank][positions[rank]]
        index, kind = code >> 3, code & 7
        at = (scheduler.forward_at if kind == F else scheduler.backward_at)[index]
        if at < 0:
            return -1, math.inf, False
        if at > now:
            return -1, at, False
        if kind == F and scheduler.weights[rank]:
            taken = -table.releases[index // count * 8 + F]
            if scheduler.held[rank] + taken > limit[rank]:
                return -1, math.inf, True
        positions[rank] += 1
        return code, now, False

    return scheduler.run(next_in_order)
