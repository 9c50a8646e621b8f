"""Text drawing of a schedule over time: one line per rank."""

from __future__ import annotations

import math
from statistics import median

from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.codes import CODE_OF
from elche.schedule.costs import PipelineCosts
from elche.schedule.timing import CostTable, Timing

IDLE = "·"
SHOWN_RANKS = 32
SHOWN_PARTS = 6
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.FULL_BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}


def legend(schedule: Schedule) -> str:
    """Legend of the letters that `draw` uses for the schedule."""
    kinds = {one.kind for row in schedule.actions for one in row}
    letters = [f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in kinds]
    parts = [", ".join(letters)]
    if schedule.num_stages > len(set(schedule.placement)):
        parts.append("small letters: a rank's later stages")
    return "; ".join([*parts, f"{IDLE} idle"])


def draw(schedule: Schedule, timing: Timing, costs: PipelineCosts, width: int) -> str:
    """Draws each rank's computation on one time axis.

    An action shows its letter and microbatch, if they fit, then dashes for the rest of
    its time. Actions of a rank's second and later stages use small letters. Dots are
    idle time. If one line of `width` characters is too narrow, the time axis is split
    into up to `SHOWN_PARTS` parts below each other.
    """
    table = CostTable(costs)
    label = len(f"rank {schedule.num_ranks - 1} ")
    columns = max(width - label, 16)
    parts = _parts(schedule, timing, table, columns)
    scale = parts * columns / timing.makespan if timing.makespan > 0 else 0.0
    ranks = range(min(schedule.num_ranks, SHOWN_RANKS))
    rows = [_row(schedule, timing, table, rank, scale) for rank in ranks]
    lines = []
    for part in range(parts):
        if parts > 1:
            ends = [timing.makespan * at / parts for at in (part, part + 1)]
            lines.append(f"time {ends[0]:.4g} to {ends[1]:.4g}")
        for rank, row in zip(ranks, rows, strict=True):
            shown = row.ljust(parts * columns, IDLE)[part * columns :][:columns]
            lines.append(f"{f'rank {rank}':<{label}}{shown}")
    if schedule.num_ranks > SHOWN_RANKS:
        lines.append(f"and {schedule.num_ranks - SHOWN_RANKS} ranks more")
    return "\n".join(lines)


def _parts(schedule: Schedule, timing: Timing, table: CostTable, columns: int) -> int:
    """Lines per rank at which the median action shows its microbatch and end."""
    lengths = [
        length
        for row in schedule.actions
        for one in row
        if (length := _length(table, one)) > 0
    ]
    if not lengths:
        return 1
    letters = len(f"F{schedule.num_microbatches - 1}-")
    needed = letters * timing.makespan / median(lengths)
    return max(1, min(SHOWN_PARTS, math.ceil(needed / columns)))


def _row(
    schedule: Schedule, timing: Timing, table: CostTable, rank: int, scale: float
) -> str:
    cells = [IDLE] * round(timing.makespan * scale)
    first = min(schedule.stages_of(rank), default=0)
    for one, start in zip(
        schedule.actions[rank], timing.action_starts[rank], strict=True
    ):
        length = _length(table, one)
        begin, end = round(start * scale), round((start + length) * scale)
        letter = one.kind.value if one.stage == first else one.kind.value.lower()
        text = f"{letter}{one.microbatch}"
        if len(text) > end - begin:
            text = letter
        cells[begin:end] = text.ljust(end - begin, "-")[: end - begin]
    return "".join(cells)


def _length(table: CostTable, action: StageAction) -> float:
    return table.durations[action.stage * 8 + CODE_OF[action.kind]]
