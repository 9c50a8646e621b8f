"""Actions as integers, for speed with schedules of 200 000 of them.

A code is ``(stage * num_microbatches + microbatch) * 8 + kind``. Generators, the
simulation and the schedulers work on codes; `Schedule` is for everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from elche.schedule.actions import Kind, Schedule, StageAction

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)  # noqa: E741 - the field's letters
KINDS = (
    Kind.FORWARD,
    Kind.FULL_BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.SEND_F,
    Kind.RECV_F,
    Kind.SEND_B,
    Kind.RECV_B,
)
_CODE_OF = {kind: code for code, kind in enumerate(KINDS)}

Rows = list[list[int]]
"""Codes of each rank in its order."""


def encode(schedule: Schedule) -> Rows:
    """Codes of a schedule's actions."""
    count = schedule.num_microbatches
    return [
        [(one.stage * count + one.microbatch) * 8 + _CODE_OF[one.kind] for one in row]
        for row in schedule.actions
    ]


def decode_one(code: int, count: int) -> StageAction:
    """The action of a code, with `count` microbatches."""
    stage, microbatch = divmod(code >> 3, count)
    return StageAction(stage, KINDS[code & 7], microbatch)


def decode(
    name: str, rows: Sequence[Sequence[int]], placement: Sequence[int], count: int
) -> Schedule:
    """The schedule of codes."""
    return Schedule(
        name=name,
        num_microbatches=count,
        placement=tuple(placement),
        actions=tuple(tuple(decode_one(code, count) for code in row) for row in rows),
    )


def spread(rows: Rows, order: Sequence[int], num_ranks: int) -> Rows:
    """Gives renumbered ranks their old numbers; the others get no actions.

    Args:
        rows: codes of each renumbered rank.
        order: the old number of each.
        num_ranks: ranks in the old numbering.
    """
    result: Rows = [[] for _ in range(num_ranks)]
    for row, rank in zip(rows, order, strict=True):
        result[rank] = row
    return result
