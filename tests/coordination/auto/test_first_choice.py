"""How many steps ``auto`` measures before its first choice."""

from __future__ import annotations

from typing import Any

import pytest

from elche.cadence.chooser import Choice
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.auto.first_choice import MOST_STEPS
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from tests.coordination.sync.granted_steps import grants_in, members, ran, run_epoch

BATCH = 32


def first_choice(
    fixed_s: float,
    sync_s: float,
    run_steps: int,
    slower: float = 1.0,
    compiling_s: float = 0.0,
) -> tuple[int, Choice]:
    """Warm steps until the choice, and the choice; two devices, 1 ms per sample."""

    def report(grant: GrantBatches, rank: int) -> StepsDone:
        sizes = grant.shares
        took_s = [fixed_s + 0.001 * sizes[0], slower * (fixed_s + 0.001 * sizes[1])]
        took_s = [took + compiling_s * (not grant.start) for took in took_s]
        wait_s = sync_s + max(took_s) - took_s[rank]
        return ran(grant, rank, took_s[rank], sync_wait_s=wait_s)

    chooser, told = measured(2, sync_s, run_steps, report)
    assert chooser._choice is not None
    return told[-1].start, chooser._choice


def measured(
    ranks: int, sync_s: float, run_steps: int, report: Any
) -> tuple[AutoChooser, list[GrantBatches]]:
    """Steps of ranks until the first choice."""
    settings = Settings(config=RunConfig(policy="auto"), epochs=1)
    chooser = AutoChooser(members(*["cpu"] * ranks), settings)
    return chooser, steps_of(chooser, sync_s, run_steps, report)


def steps_of(
    chooser: AutoChooser, sync_s: float, steps: int, report: Any
) -> list[GrantBatches]:
    """An epoch's steps until the first choice."""
    chooser.prepare(sync_s, 0.0, alike=True)
    sizes = BatchSizes.of([BATCH] * steps)
    told = run_epoch(chooser, sizes, report, lambda: chooser._choice is not None)
    return [grant for _, grant in grants_in(told)]


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ((0.01, 1.0, 300), 0),  # a reduction takes a hundredth of the run
        ((0.0, 2.0, 200, 1.0, 0.65), 1),  # a first step that compiled
        ((0.2, 0.1, 100_000, 8.0), 2),  # nearly all of a step is fixed
    ],
)
def test_few_steps_decide_for_one_device(run: tuple[Any, ...], steps: int) -> None:
    made_after, found = first_choice(*run)
    assert (made_after, found.is_alone) == (steps, True)


@pytest.mark.parametrize(("run_steps", "least"), [(1000, 2), (100_000, MOST_STEPS)])
def test_a_clear_gain_is_made_sure_of_where_that_is_free(
    run_steps: int, least: int
) -> None:
    steps, found = first_choice(0.0, 0.05, run_steps)
    assert not found.is_alone
    assert found.policy == "async"
    assert least <= steps <= (least if least == MOST_STEPS else 6)


def test_the_fastest_rank_gets_the_whole_batch_in_every_other_step() -> None:
    """Which shows what it would take alone, and what is fixed of the others' steps."""
    _, told = measured(3, 0.001, 10_000, unequal)
    alternates(told)


def unequal(grant: GrantBatches, rank: int) -> StepsDone:
    busy_s = (0.004, 0.002, 0.003)[rank] * (0.5 + grant.shares[rank])
    return ran(grant, rank, busy_s, sync_wait_s=0.001)


def alternates(told: list[GrantBatches]) -> None:
    shares = [grant.shares for grant in told]
    assert shares[2] == shares[4] == (1, BATCH - 2, 1)
    assert min(shares[0] + shares[1] + shares[3]) > 1


def test_a_join_before_the_choice_begins_the_measured_steps_again() -> None:
    """An odd count of them, kept, would grant least shares at once."""
    settings = Settings(config=RunConfig(policy="auto"), epochs=10_000)
    *two, newcomer = members(*["cpu"] * 3)
    chooser = AutoChooser(two, settings)
    assert len(steps_of(chooser, 0.001, 2, unequal)) == 2
    assert chooser._measures.count == 1
    chooser.add(newcomer)
    alternates(steps_of(chooser, 0.001, 8, unequal))
