"""Local improvement of a schedule along its critical path.

The move is the classic one of job-shop scheduling (Nowicki and Smutnicki 1996). It
swaps two adjacent actions of a rank on the critical path, if the later one's input was
ready before the earlier one began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from elche.errors import ConfigError
from elche.schedule.codes import B, F, I, Rows, W
from elche.schedule.timing import CostTable, makespan_of, peaks, run_rows

_TOLERANCE = 1e-9


def improve(rows: Rows, table: CostTable, count: int, evaluations: int) -> Rows:
    """Swaps neighbouring actions while that shortens the makespan.

    Tries at most `evaluations` schedules, within the memory limits of the costs.
    """
    rows = [list(row) for row in rows]
    starts = run_rows(rows, table, count)
    best = makespan_of(rows, starts, table, count)
    improved = True
    while improved and evaluations > 0:
        improved = False
        for rank, position in _swaps(rows, starts, table, count):
            if evaluations == 0:
                break
            row = rows[rank]
            row[position - 1 : position + 1] = row[position], row[position - 1]
            (held,) = peaks([row], table, count)
            if held <= table.limits[rank] + _TOLERANCE:
                evaluations -= 1
                try:
                    tried = run_rows(rows, table, count)
                except ConfigError:  # with zero-duration actions a swap can deadlock
                    time = math.inf
                else:
                    time = makespan_of(rows, tried, table, count)
                if time < best - _TOLERANCE * best:
                    starts, best, improved = tried, time, True
                    break
            row[position - 1 : position + 1] = row[position], row[position - 1]
    return rows


def _swaps(
    rows: Rows, starts: list[list[float]], table: CostTable, count: int
) -> Iterator[tuple[int, int]]:
    """Rank and position of each action that may move before its neighbour."""
    ready, place = _ready_times(rows, starts, table, count)
    durations = table.durations
    rank = max(
        (rank for rank in range(len(rows)) if rows[rank]),
        key=lambda each: (
            starts[each][-1]
            + durations[(rows[each][-1] >> 3) // count * 8 + (rows[each][-1] & 7)]
        ),
    )
    position = len(rows[rank]) - 1
    while True:
        code, start = rows[rank][position], starts[rank][position]
        source = ready[rank][position]
        if position and source[0] < start - _TOLERANCE * (1 + start):
            before = rows[rank][position - 1]
            # Never swap F with its I, or I with its W.
            may_swap = before >> 3 != code >> 3 and before & 7 != code & 7
            if source[0] <= starts[rank][position - 1] and may_swap:
                yield rank, position
            position -= 1
        elif source[1] >= 0:
            rank, position = place[source[1]]
        elif position:
            position -= 1
        else:
            return


def _ready_times(
    rows: Rows, starts: list[list[float]], table: CostTable, count: int
) -> tuple[list[list[tuple[float, int]]], dict[int, tuple[int, int]]]:
    """Arrival and source (index * 2 + is_backward) per input; place of each source."""
    place: dict[int, tuple[int, int]] = {}
    ends: dict[int, float] = {}
    for rank, (row, begun) in enumerate(zip(rows, starts, strict=True)):
        for position, (code, start) in enumerate(zip(row, begun, strict=True)):
            kind = code & 7
            if kind != W:
                key = (code >> 3) * 2 + (kind != F)
                place[key] = rank, position
                stage = (code >> 3) // count
                ends[key] = start + table.durations[stage * 8 + kind]
    ready = []
    for row in rows:
        times = []
        for code in row:
            index, kind = code >> 3, code & 7
            stage = index // count
            if kind == F and stage > 0:
                key, link = (index - count) * 2, table.links[stage - 1]
            elif kind in (B, I) and stage < table.num_stages - 1:
                key, link = (index + count) * 2 + 1, table.links[stage]
            else:
                key, link = -1, 0.0
            times.append((ends[key] + link if key >= 0 else 0.0, key))
        ready.append(times)
    return ready, place
