"""How many steps ``auto`` measures before its first choice."""

from __future__ import annotations

import pytest

from elche.cadence.chooser import Choice
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.auto.first_choice import MOST_STEPS
from elche.coordination.policy import Member
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import GrantBatches
from tests.coordination.test_core import steps_done

BATCH = 32


def done(
    count: int, rank: int, samples: int, busy_s: float, wait_s: float
) -> StepsDone:
    """A rank's report of one step."""
    took = {"samples": samples, "busy_s": busy_s, "sync_wait_s": wait_s}
    return steps_done(rank, count, count + 1, warm=count > 0, **took)


def first_choice(
    fixed_s: float,
    sync_s: float,
    run_steps: int,
    slower: float = 1.0,
    compiling_s: float = 0.0,
) -> tuple[int, Choice]:
    """Warm steps until the choice, and the choice; two devices, 1 ms per sample."""
    members = [Member(rank, "cpu", 2) for rank in range(2)]
    config = RunConfig(policy="auto")
    chooser = AutoChooser(members, Settings(config=config, epochs=1))
    chooser.prepare(sync_s, 0.0, alike=True)
    begun = chooser.begin_epoch(0, BatchSizes.of([BATCH] * run_steps), 0.0)
    told = [one for one in begun.instructions if isinstance(one, GrantBatches)]
    for count in range(MOST_STEPS + 2):
        sizes = told[-1].shares
        took_s = [fixed_s + 0.001 * sizes[0], slower * (fixed_s + 0.001 * sizes[1])]
        if not count:
            took_s = [s + compiling_s for s in took_s]
        for rank in range(2):
            wait_s = sync_s + max(took_s) - took_s[rank]
            report = done(count, rank, sizes[rank], took_s[rank], wait_s)
            answer = chooser.policy.handle(report, 0.0).instructions
            told += [one for one in answer if isinstance(one, GrantBatches)]
        if chooser._choice is not None:
            return count, chooser._choice
    raise AssertionError("it never chose")


def test_a_reduction_of_a_hundredth_of_the_run_lets_the_first_step_decide() -> None:
    steps, found = first_choice(0.01, 1.0, 300)
    assert steps == 0
    assert found.is_alone


def test_a_first_step_that_compiled_decides_for_no_windows() -> None:
    """By it a run of 6 s seemed one of 130 s, in which windows of 2.4 s pay."""
    steps, found = first_choice(0.0, 2.0, 200, compiling_s=0.65)
    assert steps == 1
    assert found.is_alone


def test_devices_that_are_hopeless_together_are_measured_no_further() -> None:
    """All but nothing of a step is fixed: equal steps and one whole batch show it."""
    steps, found = first_choice(0.2, 0.1, 100_000, slower=8.0)
    assert steps == 2
    assert found.is_alone


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
    members = [Member(rank, "cpu", 2) for rank in range(3)]
    chooser = AutoChooser(members, Settings(config=RunConfig(policy="auto"), epochs=1))
    chooser.prepare(0.001, 0.0, alike=True)
    begun = chooser.begin_epoch(0, BatchSizes.of([BATCH] * 10_000), 0.0)
    told = [one for one in begun.instructions if isinstance(one, GrantBatches)]
    shares = []
    for count in range(5):
        shares.append(sizes := told[-1].shares)
        for rank in range(3):
            busy_s = (0.004, 0.002, 0.003)[rank] * (0.5 + sizes[rank])
            report = done(count, rank, sizes[rank], busy_s, 0.001)
            answer = chooser.policy.handle(report, 0.0).instructions
            told += [one for one in answer if isinstance(one, GrantBatches)]
    assert shares[2] == shares[4] == (1, BATCH - 2, 1)
    assert min(shares[0] + shares[1] + shares[3]) > 1
