"""A lower bound on makespans, of any schedule.

What no order can hide is the *fill*, until the first gradient comes back to a rank,
less the forwards that its memory lets it run meanwhile; and the *drain*, from a rank's
last input gradient until stage 0 is done, less the weight gradients that its memory
lets it keep for then. Between the two a rank may be busy all the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elche.schedule.codes import F, W
from elche.schedule.timing import CostTable

_TOLERANCE = 1e-9


class MakespanBounds:
    """Bounds for the costs of one pipeline."""

    def __init__(self, table: CostTable, count: int, limits: Sequence[float]) -> None:
        self.table, self.count = table, count
        last = table.num_stages - 1
        parts = [
            table.durations[stage * 8 : stage * 8 + 4] for stage in range(last + 1)
        ]
        # When the first microbatch may reach each stage, forwards and backwards.
        self.forward_at = [0.0] * (last + 1)
        self.backward_at = [0.0] * (last + 1)
        for stage in range(last):
            self.forward_at[stage + 1] = (
                self.forward_at[stage] + parts[stage][0] + table.links[stage]
            )
        self.backward_at[last] = self.forward_at[last] + parts[last][0]
        for stage in range(last, 0, -1):
            _, whole, inputs, _ = parts[stage]
            self.backward_at[stage - 1] = (
                self.backward_at[stage] + min(whole, inputs) + table.links[stage - 1]
            )
        # From the last backward of each stage until the stages before it are done.
        self.drains = [0.0] * (last + 1)
        for stage in range(last + 1):
            reached = 0.0
            for before in range(stage - 1, -1, -1):
                _, whole, inputs, weights = parts[before]
                reached += table.links[before]
                ends = reached + min(whole, inputs + weights)
                self.drains[stage] = max(self.drains[stage], ends)
                reached += min(whole, inputs)
        self.work = [0.0] * table.num_ranks
        self.stages: list[list[int]] = [[] for _ in self.work]
        for stage, rank in enumerate(table.rank_of):
            forward, whole, inputs, weights = parts[stage]
            self.work[rank] += count * (forward + min(whole, inputs + weights))
            self.stages[rank].append(stage)
        self.least = max(
            self._of_one_microbatch(parts),
            max(self._of_rank(rank, limits[rank]) for rank in range(table.num_ranks)),
        )

    def _of_one_microbatch(self, parts: list[list[float]]) -> float:
        """All the way through the stages and back, after a stage's other forwards."""
        most = 0.0
        for stage, (forward, whole, inputs, weights) in enumerate(parts):
            way = self.backward_at[stage] + (self.count - 1) * forward
            ends = max(min(whole, inputs + weights), min(whole, inputs))
            drain = min(whole, inputs) + self.drains[stage]
            most = max(most, way + max(ends, drain))
        return most

    def _of_rank(self, rank: int, limit: float) -> float:
        """Fill, all the work, and drain of one rank."""
        stages = self.stages[rank]
        if not stages:
            return 0.0
        durations, releases = self.table.durations, self.table.releases
        fill = self._most_time(
            [(durations[at * 8 + F], -releases[at * 8 + F]) for at in stages], limit
        )
        kept = self._most_time(
            [(durations[at * 8 + W], releases[at * 8 + W]) for at in stages], limit
        )
        begins = self.forward_at[stages[0]]
        idle = self.backward_at[stages[-1]] - begins - fill
        drain = self.drains[stages[0]] - kept
        return begins + max(0.0, idle) + self.work[rank] + max(0.0, drain)

    def _most_time(self, parts: list[tuple[float, float]], limit: float) -> float:
        """Most time in actions of some stages, by time and memory of each, in a limit.

        Fractions of an action count, except where a rank has a single stage.
        """
        if limit == math.inf:
            return self.count * sum(time for time, _ in parts)
        total, left = 0.0, limit
        for time, taken in sorted(
            parts, key=lambda part: -part[0] / (part[1] or 1e-300)
        ):
            number: float = self.count
            if taken > 0:
                number = min(number, (left + _TOLERANCE) / taken)
                if len(parts) == 1:
                    number = math.floor(number)
                left -= number * taken
            total += number * time
        return total
