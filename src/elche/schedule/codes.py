"""Actions as integers, fast enough for 200 000 of them; completeness checks.

A code is ``(stage * num_microbatches + microbatch) * 8 + kind``. Generators, the
simulation and the schedulers work on codes; all other code uses `Schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)  # noqa: E741 - usual letters
KINDS = tuple(Kind)
CODE_OF = {kind: code for code, kind in enumerate(KINDS)}

Rows = list[list[int]]
"""Codes of each rank in execution order."""


def encode(schedule: Schedule) -> Rows:
    """Codes of a schedule's actions."""
    count = schedule.num_microbatches
    return [
        [(one.stage * count + one.microbatch) * 8 + CODE_OF[one.kind] for one in row]
        for row in schedule.actions
    ]


def decode_one(code: int, count: int) -> StageAction:
    """Action of a code, with `count` microbatches."""
    stage, microbatch = divmod(code >> 3, count)
    return StageAction(stage, KINDS[code & 7], microbatch)


def decode(
    name: str, rows: Sequence[Sequence[int]], placement: Sequence[int], count: int
) -> Schedule:
    """Schedule built from codes."""
    return Schedule(
        name=name,
        num_microbatches=count,
        placement=tuple(placement),
        actions=tuple(tuple(decode_one(code, count) for code in row) for row in rows),
    )


def spread(rows: Rows, order: Sequence[int], num_ranks: int) -> Rows:
    """Moves rows of renumbered ranks to their old numbers `order`; adds empty rows."""
    result: Rows = [[] for _ in range(num_ranks)]
    for row, rank in zip(rows, order, strict=True):
        result[rank] = row
    return result


_SHOWN = 6


def check_schedule(schedule: Schedule) -> None:
    """Checks that each stage's actions are complete, unique, on its rank and in order.

    Each stage runs exactly one F per microbatch, then either B, or I and then W.
    Sends and receives are checked by `lowering.check_deadlock_free`, not here.

    Raises:
        ConfigError: a check fails; the message lists the offending actions.
    """
    count = schedule.num_microbatches
    done: dict[int, int] = {}  # bit mask of kinds, by stage and microbatch
    for rank, row in enumerate(schedule.actions):
        for position, one in enumerate(row):
            index, kind = one.stage * count + one.microbatch, CODE_OF[one.kind]
            bits = done.get(index, 0)
            if complaint := _complaint(schedule, rank, one, bits):
                raise ConfigError(
                    f"schedule {schedule.name}: rank {rank}, action {position}, {one}: "
                    f"{complaint}"
                )
            done[index] = bits | 1 << kind
    lacking = (
        f"{index // count}{KINDS[kind]}{index % count}"
        for index in range(schedule.num_stages * count)
        for kind in ((F,) if done.get(index, 0) & 1 << B else (F, I, W))
        if not done.get(index, 0) & 1 << kind
    )
    if missing := list(islice(lacking, _SHOWN + 1)):
        more = " and more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"schedule {schedule.name} lacks {', '.join(missing[:_SHOWN])}{more}; each "
            "stage needs one F per microbatch, and either B or both I and W"
        )


_NEEDS = {B: F, I: F, W: I}
_EXCLUDES = {B: I, I: B}


def _complaint(schedule: Schedule, rank: int, one: StageAction, bits: int) -> str:
    """Error text: an action cannot follow those of its stage and microbatch, `bits`."""
    if one.stage >= schedule.num_stages or one.microbatch >= schedule.num_microbatches:
        return (
            f"there are {schedule.num_stages} stages and {schedule.num_microbatches} "
            "microbatches"
        )
    kind = CODE_OF[one.kind]
    if schedule.placement[one.stage] != rank:
        return f"stage {one.stage} is on rank {schedule.placement[one.stage]}"
    if bits & 1 << kind:
        return "it is there twice"
    if kind in _EXCLUDES and bits & 1 << _EXCLUDES[kind]:
        other = KINDS[_EXCLUDES[kind]]
        return f"the microbatch has {other} already; it takes either B, or I and W"
    if kind in _NEEDS and not bits & 1 << _NEEDS[kind]:
        return f"it comes before its {KINDS[_NEEDS[kind]]}"
    return ""
