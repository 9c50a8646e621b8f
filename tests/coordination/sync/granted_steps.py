"""Steps that a policy grants, run by ranks of which only the times are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.policy import Member, PolicyChooser
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches, Instruction
from tests.coordination.test_core import steps_done

HORIZON = 3


def members(*devices: str) -> list[Member]:
    """A rank for each device."""
    return [Member(rank, name, HORIZON) for rank, name in enumerate(devices)]


PAIR = members("CPU", "CPU")


def granted(told: list[Instruction]) -> list[GrantBatches]:
    """The grants of steps of the first rank, which are those of all.

    Local batches of windows are granted without shares.
    """
    return [
        each
        for each in told
        if isinstance(each, GrantBatches)
        and each.rank == 0
        and (each.shares or each.start == each.stop)
    ]


def ran(grant: GrantBatches, rank: int, busy_s: float = 0.01, **said: Any) -> StepsDone:
    """A rank has run its part of a grant, each of its steps in so many seconds."""
    steps = grant.stop - grant.start
    usual = {
        "samples": steps * grant.shares[rank],
        "busy_s": steps * busy_s,
        "warm": grant.start > 0,
    }
    return steps_done(rank, grant.start, grant.stop, **{**usual, **said})


def run_epoch(
    chooser: PolicyChooser,
    sizes: BatchSizes,
    report: Callable[[GrantBatches, int], StepsDone],
    until: Callable[[], bool] = lambda: False,
) -> list[tuple[int, Instruction]]:
    """All that ranks are told in an epoch of steps, and the steps run before it.

    Args:
        chooser: grants them.
        sizes: of the epoch.
        report: of a rank that has run a grant.
        until: the rest is not run.
    """
    begun = chooser.begin_epoch(0, sizes, 0.0)
    told = [(0, each) for each in begun.instructions]
    for _, grant in told:  # it grows
        if until():
            break
        if not isinstance(grant, GrantBatches) or grant.rank:
            continue
        for rank in range(len(grant.shares)):
            answer = chooser.policy.handle(report(grant, rank), 0.0)
            chooser.policy.check()
            told += [(grant.stop, each) for each in answer.instructions]
    return told


def grants_in(told: list[tuple[int, Instruction]]) -> list[tuple[int, GrantBatches]]:
    """The first rank's grants of an epoch, each with the steps run before it."""
    return [(done, grant) for done, each in told for grant in granted([each])]
