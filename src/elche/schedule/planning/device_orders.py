"""Orders of the devices along the pipeline, the most promising first.

If there are at most `ALL_ORDERS` different orders, all are tried. Otherwise four are
(as given, fast first, slow first, and much memory first), and the best of them is
improved by swapping two devices at a time. Devices of one kind, speed and memory,
without links of their own, are interchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, islice

from elche.schedule.planning.partition import ProfileTable, best_partition, sum_bound

ALL_ORDERS = 24
SWAPPED_ORDERS = 64
_SWAPPED_WORK = 64 * 8 * 8 * 48  # orders, devices squared, layers


def device_orders(table: ProfileTable, held: int) -> list[tuple[int, ...]]:
    """Orders of the devices, sorted by their least sum-bound.

    Each device must hold the activations of `held` microbatches.
    """
    orders = list(islice(_different_orders(_classes(table)), ALL_ORDERS + 1))
    if len(orders) > ALL_ORDERS:
        orders = _swapped_orders(table, held)
    return sorted(orders, key=lambda order: _bound(table, order, held))


def _swapped_orders(table: ProfileTable, held: int) -> list[tuple[int, ...]]:
    """Orders sorted by speed and memory, and the best of them improved by swaps."""
    devices = table.profile.devices
    indices = range(len(devices))
    time = {each: table.work(each, 0, len(table.profile.layers)) for each in indices}
    seen: dict[tuple[int, ...], tuple[int, float]] = {}
    for order in (
        tuple(indices),
        tuple(sorted(indices, key=lambda each: time[each])),
        tuple(sorted(indices, key=lambda each: -time[each])),
        tuple(sorted(indices, key=lambda each: -devices[each].memory_bytes)),
    ):
        seen.setdefault(order, _bound(table, order, held))
    best = min(seen, key=lambda order: seen[order])
    size = len(devices) ** 2 * len(table.profile.layers)
    most = min(SWAPPED_ORDERS, _SWAPPED_WORK // size)
    improved = True
    while improved and len(seen) < most:
        improved = False
        for one, other in combinations(indices, 2):
            swapped = list(best)
            swapped[one], swapped[other] = best[other], best[one]
            order = tuple(swapped)
            if order in seen:
                continue
            seen[order] = _bound(table, order, held)
            if seen[order] < seen[best]:
                best, improved = order, True
                break
            if len(seen) >= most:
                break
    return list(seen)


def _bound(table: ProfileTable, order: tuple[int, ...], held: int) -> tuple[int, float]:
    """Sort key of an order: 0 to 2 for its lack of memory, then its least sum-bound."""
    for tight, room in enumerate((held, 1)):
        found = best_partition(table, order, (room,) * len(order))
        if found is not None:
            return tight, sum_bound(table, found)
    return 2, math.inf


def _classes(table: ProfileTable) -> list[list[int]]:
    """Groups of interchangeable devices; a device with its own link is alone."""
    profile = table.profile
    linked = {each for pair in profile.links for each in pair}
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(profile.devices):
        key = one.kind, one.speed, one.memory_bytes, index if index in linked else -1
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _different_orders(classes: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Every order of the devices, with interchangeable ones in index order."""
    if not any(classes):
        yield ()
        return
    for index, group in enumerate(classes):
        if group:
            rest = [*classes[:index], group[1:], *classes[index + 1 :]]
            for order in _different_orders(rest):
                yield (group[0], *order)
