"""Actions as integers, for speed with 200 000 actions; completeness checks.

A code is ``(stage * num_microbatches + microbatch) * 8 + kind``. Generators, the
simulation and the schedulers work on codes; all other code uses `Schedule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)  # noqa: E741 - usual letters
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
"""Codes of each rank in execution order."""


def encode(schedule: Schedule) -> Rows:
    """Codes of a schedule's actions."""
    count = schedule.num_microbatches
    return [
        [(one.stage * count + one.microbatch) * 8 + _CODE_OF[one.kind] for one in row]
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
    """Maps renumbered ranks back to their old numbers; other ranks get no actions.

    Args:
        rows: codes of each renumbered rank.
        order: old number of each renumbered rank.
        num_ranks: number of ranks in the old numbering.
    """
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
            kind = _CODE_OF[one.kind]
            index = one.stage * count + one.microbatch
            bits = done.get(index, 0)
            if (
                one.stage >= schedule.num_stages
                or one.microbatch >= count
                or schedule.placement[one.stage] != rank
                or bits & _FORBIDS[kind]
                or bits & _NEEDS[kind] != _NEEDS[kind]
            ):
                raise ConfigError(
                    f"schedule {schedule.name}: rank {rank}, action {position}, {one}: "
                    f"{_complaint(schedule, rank, one, bits)}"
                )
            done[index] = bits | 1 << kind
    missing = list(islice(_missing(schedule, done), _SHOWN + 1))
    if missing:
        more = " and more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"schedule {schedule.name} lacks {', '.join(missing[:_SHOWN])}{more}; each "
            "stage needs one F per microbatch, and either B or both I and W"
        )


# Bit masks per kind: actions that must not, and that must, precede it.
_FORBIDS = [1 << kind for kind in range(len(KINDS))]
_FORBIDS[B] |= 1 << I
_FORBIDS[I] |= 1 << B
_NEEDS = [0] * len(KINDS)
_NEEDS[B] = _NEEDS[I] = 1 << F
_NEEDS[W] = 1 << I


def _complaint(schedule: Schedule, rank: int, one: StageAction, bits: int) -> str:
    if one.stage >= schedule.num_stages or one.microbatch >= schedule.num_microbatches:
        return (
            f"there are {schedule.num_stages} stages and {schedule.num_microbatches} "
            "microbatches"
        )
    if schedule.placement[one.stage] != rank:
        return f"stage {one.stage} is on rank {schedule.placement[one.stage]}"
    if bits & 1 << _CODE_OF[one.kind]:
        return "it is there twice"
    if bits & _FORBIDS[_CODE_OF[one.kind]]:
        other = "B" if one.kind is Kind.BACKWARD_INPUT else "I"
        return f"the microbatch has {other} already; it takes either B, or I and W"
    before = "I" if one.kind is Kind.BACKWARD_WEIGHT else "F"
    return f"it comes before its {before}"


def _missing(schedule: Schedule, done: dict[int, int]) -> Iterator[str]:
    for stage in range(schedule.num_stages):
        for each in range(schedule.num_microbatches):
            bits = done.get(stage * schedule.num_microbatches + each, 0)
            wanted = (F,) if bits & 1 << B else (F, I, W)
            for kind in wanted:
                if not bits & 1 << kind:
                    yield f"{stage}{KINDS[kind]}{each}"
