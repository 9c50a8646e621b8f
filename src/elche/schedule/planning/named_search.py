"""Partition search for one published schedule, under its own times and memory.

If there are few partitions, tries all of them in the order of a lower bound until the
bound exceeds the best step. Then moves layers, starting from the best partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations, pairwise, permutations
from typing import final

from elche.errors import ConfigError
from elche.schedule.generators.schedules import placement_for
from elche.schedule.planning.partition import Partition
from elche.schedule.planning.partition_search import (
    NEVER,
    Evaluator,
    Measure,
    descend,
    fits,
    least_s,
)

ALL_PARTITIONS = 3_000  # most partitions that are tried exhaustively
SEARCHED_ACTIONS = 60_000  # approximate budget of timed actions per schedule
_TOLERANCE = 1e-9


@final
class NamedSearch:
    """Finds the best partition for one schedule.

    Args:
        evaluator: times partitions.
        name: the schedule's name, one of `FIXED_SCHEDULES`.
        stages: stages per device, where the schedule allows several.
        ranks: numbers of devices to try.
    """

    def __init__(
        self, evaluator: Evaluator, name: str, stages: int | None, ranks: Iterable[int]
    ) -> None:
        self._evaluator, self._table, self._name = evaluator, evaluator.table, name
        profile = self._table.profile
        devices, layers = len(profile.devices), len(profile.layers)
        self._placements = {
            count: placement
            for count in ranks
            if len(placement := placement_for(name, count, stages)) <= layers
        }
        self._num_all = sum(
            math.perm(devices, count) * math.comb(layers - 1, len(placement) - 1)
            for count, placement in self._placements.items()
        )
        self._undefined: dict[int, str] = {}
        self.best: Partition | None = None
        self.least = NEVER

    def run(self, starts: Iterable[Partition]) -> None:
        """Searches, starting from these partitions."""
        until = self._evaluator.actions + SEARCHED_ACTIONS
        for each in starts:
            self._try(each)
        if self._num_all <= ALL_PARTITIONS:
            bounded = sorted(
                ((least_s(self._table, each), each) for each in self._all()),
                key=lambda pair: pair[0],
            )
            for bound_s, each in bounded:
                if self._evaluator.actions >= until or self._is_beaten(bound_s):
                    break
                self._try(each)
        if self.best is not None:
            descend(self._table, self.best, self.least, partial(self._measure, until))

    @property
    def reason(self) -> str:
        """Why the schedule is not defined for this number of devices, or ""."""
        return next(iter(self._undefined.values()), "")

    def _measure(self, until: int, partition: Partition, _: Measure) -> Measure | None:
        if self._evaluator.actions >= until:
            return None
        table = self._table
        if not fits(table, partition) or self._is_beaten(least_s(table, partition)):
            return NEVER
        return self._try(partition)

    def _try(self, partition: Partition) -> Measure:
        ranks = len(partition.ranks)
        if ranks in self._undefined or ranks not in self._placements:
            return NEVER
        try:
            found = self._evaluator.measure(self._name, partition)
        except ConfigError as error:
            self._undefined[ranks] = str(error)
            return NEVER
        lack, step_s = self.least
        if found < (lack, step_s * (1 - _TOLERANCE)):
            self.best, self.least = partition, found
        return found

    def _is_beaten(self, bound_s: float) -> bool:
        lack, step_s = self.least
        return lack == 0 and bound_s >= step_s * (1 - _TOLERANCE)

    def _all(self) -> Iterator[Partition]:
        layers = len(self._table.profile.layers)
        devices = range(len(self._table.profile.devices))
        for count, placement in self._placements.items():
            sizes = [
                tuple(end - begin for begin, end in pairwise((0, *cuts, layers)))
                for cuts in combinations(range(1, layers), len(placement) - 1)
            ]
            for order in permutations(devices, count):
                held = tuple(order[rank] for rank in placement)
                for each in sizes:
                    partition = Partition(held, each)
                    if fits(self._table, partition):
                        yield partition
