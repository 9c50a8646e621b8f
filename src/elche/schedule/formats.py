"""Schedules as CSV, which torch.distributed.pipelining reads and writes.

CSV (torch's ``_load_csv`` and ``_dump_csv``): one row per rank, one action per cell. In
torch's files an empty cell is an idle step, and ``(0F1;1B0)OVERLAP_F_B`` runs several
actions as one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from elche.errors import ConfigError
from elche.schedule.actions import Schedule, StageAction, parse_action

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_NOT_OURS = re.compile(
    r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_F|WAIT_SEND_B)\d*"
)


def to_csv(schedule: Schedule) -> str:
    """Writes a schedule so that torch's ``_load_csv`` reads it.

    Compute-only schedules use torch's format ``compute_only``, lowered ones
    ``compute_comms``. In the latter torch 2.15 requires waits for sends, which elche
    lacks.
    """
    out = io.StringIO(newline="")
    csv.writer(out).writerows(map(str, row) for row in schedule.actions)
    return out.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Reads a CSV of actions, torch's files included.

    Drops idle steps and unrolls ``OVERLAP_F_B`` in its order. Also drops actions
    unknown to elche: those of FSDP (``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``,
    ``WAIT_REDUCE_GRAD``) and waits for sends (``WAIT_SEND_F``, ``WAIT_SEND_B``). Checks
    only the form; ``codes.check_schedule`` checks the content.

    Raises:
        ConfigError: a cell is not an action, or the stages cannot be placed.
    """
    rows = [list(_unrolled(row)) for row in csv.reader(io.StringIO(text, newline=""))]
    return _schedule_of(rows, name)


def _schedule_of(rows: Sequence[Sequence[StageAction]], name: str) -> Schedule:
    """Builds a schedule from action lists: infers placement and microbatches."""
    holders: dict[int, int] = {}
    num_microbatches = 0
    for rank, row in enumerate(rows):
        for one in row:
            if holders.setdefault(one.stage, rank) != rank:
                raise ConfigError(
                    f"stage {one.stage} has actions on ranks {holders[one.stage]} and "
                    f"{rank} ({one}); a stage belongs to one rank"
                )
            num_microbatches = max(num_microbatches, one.microbatch + 1)
    if not holders:
        raise ConfigError("the schedule has no actions")
    missing = next(stage for stage in range(len(holders) + 1) if stage not in holders)
    if missing < len(holders):
        raise ConfigError(
            f"the schedule has actions of stage {max(holders)} and none of {missing}"
        )
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        placement=tuple(holders[stage] for stage in range(len(holders))),
        actions=tuple(tuple(row) for row in rows),
    )


def _unrolled(cells: Iterable[str]) -> Iterator[StageAction]:
    for cell in cells:
        text = cell.strip()
        if not text or _NOT_OURS.fullmatch(text):
            continue
        match = _OVERLAP.fullmatch(text)
        for part in match[1].split(";") if match else (text,):
            yield parse_action(part)
