"""Comparison of ranks' models by checksums of slices of the parameters. Pure.

All ranks sum the same slice of their parameters and report the sums. Devices of one
kind compare bits. Devices of different kinds round differently and compare two float64
sums, with a tolerance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

from elche.coordination.protocol.messages import CheckRows
from elche.errors import MismatchError

EVERY_STEPS = 8
SLICES = 32
LEAST_VALUES = 16_384
"""Values of a slice at least."""
MOST_VALUES = 1 << 20
"""Values summed at once at most, which bounds temporary memory."""
WALK, SHIFT = 1024.0, 16.0
"""Tolerance in roundings: a random walk of each value; a shift of all of them alike."""
CAUSES = (
    "usual causes: gradients changed after backward() in another way on each rank "
    "(noise, a factor of the rank's own loss), an optimizer step on some ranks only, "
    "parameters written or a checkpoint loaded on some ranks only; do the same on "
    "every rank"
)

Chunk: TypeAlias = list[tuple[int, int, int]]
"""(tensor, first row, one past the last) of tensors that are summed at once."""


class ModelCheck(NamedTuple):
    """Sums over one slice of a rank's parameters.

    Attributes:
        at: the step, window or slice that it was made at.
        what: names of the slice's tensors.
        kind: of the device.
        bits: sum of the values' bits, each times an odd number of its place.
        values: number of values.
        precision: relative error of a rounding.
        total: sum of the values.
        squares: sum of their squares.
    """

    at: int
    what: str
    kind: str
    bits: int
    values: int
    precision: float
    total: float
    squares: float


def plan_slices(shapes: Sequence[tuple[int, int]]) -> list[list[Chunk]]:
    """Cuts tensors of one dtype into slices of about equal size.

    Args:
        shapes: rows of each tensor, and values in each row.
    """
    total = sum(rows * values for rows, values in shapes)
    most = max(LEAST_VALUES, math.ceil(total / SLICES))
    per_chunk = min(most, MOST_VALUES)
    chunks: list[Chunk] = []
    room = 0
    for tensor, (rows, values) in enumerate(shapes):
        start = 0
        while start < rows and values:
            if room < values:
                chunks.append([])
                room = per_chunk
            stop = min(rows, start + max(1, room // values))
            chunks[-1].append((tensor, start, stop))
            room -= (stop - start) * values
            start = stop
    size = math.ceil(most / per_chunk)
    return [chunks[at : at + size] for at in range(0, len(chunks), size)]


def slice_at(steps: int) -> int | None:
    """The slice to check after so many steps, modulo the number of slices; or None."""
    turn, rest = divmod(steps, EVERY_STEPS)
    return None if rest or not turn else turn - 1


def parted(checks: Mapping[int, ModelCheck]) -> tuple[list[int], list[int]] | None:
    """Ranks that differ, and those they differ from; None where all agree.

    The reference of each kind of device is what most of its ranks hold, or its lowest
    rank.
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
    """Whether rounding on two kinds of devices explains the difference."""
    squares = max(one.squares, other.squares)
    shift = SHIFT * math.sqrt(max(one.values, other.values))
    most = max(one.precision, other.precision) * (WALK + shift)
    if not math.isfinite(squares + one.total + other.total):
        return True  # NaN and Inf have their own error
    is_near = abs(one.total - other.total) <= most * math.sqrt(squares)
    return is_near and abs(one.squares - other.squares) <= 2 * most * squares


def refuse_parted(
    rows: Mapping[int, CheckRows],
    when: str,
    before: str,
    since: dict[str, str] | None = None,
    causes: str = CAUSES,
) -> None:
    """Compares the checks that ranks report.

    Args:
        rows: of each rank.
        when: these were made; `{at}` stands for a check's own place.
        before: this, ranks were equal, where `since` does not say.
        since: when tensors were last found equal, by their names; it is updated.
        causes: of a difference.

    Raises:
        MismatchError: ranks hold different values.
    """
    since = {} if since is None else since
    found: dict[int, dict[int, ModelCheck]] = {}
    for rank, checks in rows.items():
        for row in checks:
            found.setdefault(row[0], {})[rank] = ModelCheck(*row)
    for at in sorted(found):
        sides, time = parted(found[at]), when.format(at=at)
        what = found[at][sides[0][0] if sides else min(found[at])].what
        if sides is not None:
            raise MismatchError(
                f"{_named(sides[0])} and {_named(sides[1])} hold different values in "
                f"{what} {time}; they were equal {since.get(what, before)}; {causes}"
            )
        since[what] = time


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@final
class ModelChecks:
    """Checks of an epoch's steps or windows.

    Args:
        when: they are made; with `{at}`.
    """

    def __init__(self, when: str) -> None:
        self._when = when
        self._epoch = 0
        self._since: dict[str, str] = {}

    def begin_epoch(self, epoch: int) -> None:
        """An epoch, or its next part, begins: all ranks hold one model."""
        self._epoch = epoch
        self._since.clear()

    def compare(self, rows: Mapping[int, CheckRows]) -> None:
        """Compares what the ranks of one group report.

        Raises:
            MismatchError: they have parted.
        """
        when = f"{self._when} of epoch {self._epoch}"
        before = f"when epoch {self._epoch}, or this part of it, began"
        refuse_parted(rows, when, before, self._since)
