"""Completeness checks of a schedule, whatever its order between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.codes import KINDS, B, F, I, W

_SHOWN = 6
_CODE_OF = {kind: code for code, kind in enumerate(KINDS)}


def check_schedule(schedule: Schedule) -> None:
    """Checks the actions of each stage: all there, once, on its rank, in order.

    Each stage runs exactly one F per microbatch, then either B, or I and then W.
    Sends and receives are checked by `lowering.check_deadlock_free`, not here.

    Raises:
        ConfigError: it is not so; the offending actions are printed.
    """
    count = schedule.num_microbatches
    done: dict[int, int] = {}  # bits of the kinds, by stage and microbatch
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


# What may not stand before an action of each kind, and what must, as bits.
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
    return f"it stands before its {before}"


def _missing(schedule: Schedule, done: dict[int, int]) -> Iterator[str]:
    for stage in range(schedule.num_stages):
        for each in range(schedule.num_microbatches):
            bits = done.get(stage * schedule.num_microbatches + each, 0)
            wanted = (F,) if bits & 1 << B else (F, I, W)
            for kind in wanted:
                if not bits & 1 << kind:
                    yield f"{stage}{KINDS[kind]}{each}"
