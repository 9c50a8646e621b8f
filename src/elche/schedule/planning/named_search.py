"""Partition search for one published schedule, under its own times and memory.

If there are few partitions, tries all of them in the order of a lower bound until the
bound exceeds the best step. Then moves layers, starting from the best partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise, permutations

from elche.errors import ConfigError
from elche.schedule.generators.schedules import placement_for
from elche.schedule.planning.partition import Partition, ProfileTable
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


def best_named(
    evaluator: Evaluator,
    name: str,
    stages: int | None,
    ranks: Iterable[int],
    starts: Iterable[Partition],
) -> tuple[Partition | None, str]:
    """Finds the best partition for one published schedule.

    Args:
        evaluator: times partitions.
        name: the schedule's name.
        stages: stages per device, where the schedule allows several.
        ranks: numbers of devices to try.
        starts: the first partitions to try.

    Returns:
        The partition, and why the schedule is not defined for a number of devices.
    """
    table, until = evaluator.table, evaluator.actions + SEARCHED_ACTIONS
    devices, layers = len(table.profile.devices), len(table.profile.layers)
    placements = {count: placement_for(name, count, stages) for count in ranks}
    placements = {n: each for n, each in placements.items() if len(each) <= layers}
    least, undefined = NEVER, dict[int, str]()
    best: Partition | None = None

    def attempt(partition: Partition) -> Measure:
        nonlocal best, least
        count = len(partition.ranks)
        if count in undefined or count not in placements:
            return NEVER
        try:
            found = evaluator.measure(name, partition)
        except ConfigError as error:
            undefined[count] = str(error)
            return NEVER
        if found < (least[0], least[1] * (1 - _TOLERANCE)):
            best, least = partition, found
        return found

    def is_beaten(bound_s: float) -> bool:
        return least[0] == 0 and bound_s >= least[1] * (1 - _TOLERANCE)

    def measure(partition: Partition, _: Measure) -> Measure | None:
        if evaluator.actions >= until:
            return None
        if not fits(table, partition) or is_beaten(least_s(table, partition)):
            return NEVER
        return attempt(partition)

    for each in starts:
        attempt(each)
    num_all = sum(
        math.perm(devices, count) * math.comb(layers - 1, len(placement) - 1)
        for count, placement in placements.items()
    )
    if num_all <= ALL_PARTITIONS:
        fitting = [one for one in _all(placements, table) if fits(table, one)]
        bounds = {each: least_s(table, each) for each in fitting}
        for each in sorted(fitting, key=lambda one: bounds[one]):
            if evaluator.actions >= until or is_beaten(bounds[each]):
                break
            attempt(each)
    if best is not None:
        descend(table, best, least, measure)
    return best, next(iter(undefined.values()), "")


def _all(
    placements: Mapping[int, tuple[int, ...]], table: ProfileTable
) -> Iterator[Partition]:
    layers = len(table.profile.layers)
    for count, placement in placements.items():
        sizes = [
            tuple(end - begin for begin, end in pairwise((0, *cuts, layers)))
            for cuts in combinations(range(1, layers), len(placement) - 1)
        ]
        for order in permutations(range(len(table.profile.devices)), count):
            held = tuple(order[rank] for rank in placement)
            yield from (Partition(held, each) for each in sizes)
