"""Comparison of ranks' models by checksums of slices of the parameters. Pure.

All ranks sum the same slice of their parameters and report the sums. Devices of one
kind compare bits. Devices of different kinds round differently and compare two float64
sums, with a tolerance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from elche.coordination.protocol.messages import CheckRows
from elche.errors import MismatchError

EVERY_STEPS = 8
SLICES = 32
LEAST_VALUES, MOST_VALUES = 1 << 14, 1 << 22
"""Least and most values of a slice; the most bounds temporary memory."""
WALK, SHIFT = 1024.0, 16.0
"""Tolerances in roundings: of each value's random walk, of a shift common to all."""
BEFORE = "where the epoch, or its last part, began"
CAUSES = (
    "usual causes: gradients changed after backward() in another way on each rank "
    "(noise, a factor of the rank's own loss), an optimizer step on some ranks only, "
    "parameters written or a checkpoint loaded on some ranks only; do the same on "
    "every rank"
)


class ModelCheck(NamedTuple):
    """Checksums of a slice of a rank's parameters: bits, values and squares.

    Attributes:
        at: step, window or slice at which the checksums were computed.
        what: names of the summed tensors.
        kind: kind of the device.
        bits: checksum of the bit patterns.
        values: number of values.
        precision: relative error of one rounding.
        total: sum of the values.
        squares: sum of the squares.
    """

    at: int
    what: str
    kind: str
    bits: int
    values: int
    precision: float
    total: float
    squares: float


def plan_slices(shapes: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cuts tensors into slices of about equal size: lists of (tensor, first row, end).

    ``shapes`` holds (rows, values per row) of each tensor.
    """
    total = sum(rows * values for rows, values in shapes)
    most = min(MOST_VALUES, max(LEAST_VALUES, math.ceil(total / SLICES)))
    slices: list[list[tuple[int, int, int]]] = []
    room = 0
    for tensor, (rows, values) in enumerate(shapes):
        start = 0
        while start < rows and values:
            if room < values:
                slices.append([])
                room = most
            stop = min(rows, start + max(1, room // values))
            slices[-1].append((tensor, start, stop))
            room -= (stop - start) * values
            start = stop
    return slices


def parted(checks: Mapping[int, ModelCheck]) -> tuple[list[int], list[int]] | None:
    """Returns ranks that differ and ranks they differ from; None if all agree.

    The reference of each kind of device is its ranks' most frequent checksum, or that
    of its lowest rank.
    """
    kinds: dict[tuple[str, str], dict[int, ModelCheck]] = {}
    for rank, check in sorted(checks.items()):
        kinds.setdefault((check.what, check.kind), {})[rank] = check
    known: dict[str, tuple[ModelCheck, list[int]]] = {}
    for alike in kinds.values():
        counts = Counter(check.bits for check in alike.values())
        first = max(alike.values(), key=lambda check: counts[check.bits])
        same = [rank for rank, check in alike.items() if check.bits == first.bits]
        if len(same) < len(alike):
            return sorted(alike.keys() - set(same)), same
        other, ranks = known.setdefault(first.what, (first, same))
        if not _is_near(other, first):
            return same, ranks
    return None


def _is_near(one: ModelCheck, other: ModelCheck) -> bool:
    """Returns True if rounding on two kinds of devices explains the difference."""
    squares = max(one.squares, other.squares)
    most = max(one.precision, other.precision)
    most *= WALK + SHIFT * math.sqrt(max(one.values, other.values))
    if not math.isfinite(squares + one.total + other.total):
        return True  # NaN and Inf have their own error
    is_near = abs(one.total - other.total) <= most * math.sqrt(squares)
    return is_near and abs(one.squares - other.squares) <= 2 * most * squares


@final
class ModelChecks:
    """Compares ranks' models at several places; remembers when tensors were equal.

    Args:
        when: description of the time of a check; `{at}` is replaced by its place.
        before: time at which tensors that were not compared yet were equal: all ranks
            hold one model where an epoch, or a part of it, begins.
        causes: possible causes of a difference.
    """

    def __init__(self, when: str, before: str = "", causes: str = CAUSES) -> None:
        self._when, self._before, self._causes = when, before or BEFORE, causes
        self._since: dict[str, str] = {}

    def compare(self, rows: Mapping[int, CheckRows]) -> None:
        """Compares the checksums reported by the ranks of one group.

        Raises:
            MismatchError: ranks hold different values.
        """
        found: dict[int, dict[int, ModelCheck]] = {}
        for rank, checks in rows.items():
            for row in checks:
                found.setdefault(row[0], {})[rank] = ModelCheck(*row)
        for at in sorted(found):
            sides, time = parted(found[at]), self._when.format(at=at)
            what = found[at][sides[0][0] if sides else min(found[at])].what
            if sides is not None:
                one, other = (", ".join(map(str, side)) for side in sides)
                since = self._since.get(what, self._before)
                raise MismatchError(
                    f"ranks [{one}] and [{other}] hold different values in {what} "
                    f"{time}; they were equal {since}; {self._causes}"
                )
            self._since[what] = time
