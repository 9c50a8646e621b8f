"""The default's one line on what windows would bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence.goodput import MeasuredCluster, predict
from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.windows_advice import ADVICE_GRANTS, advice
from elche.coordination.policy import PolicyChooser
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import (
    GrantSteps,
    Instruction,
    PolicyChosen,
)
from elche.coordination.state import policy_chooser
from tests.coordination.sync.granted_steps import PAIR, ran, run_epoch
from tests.harness.reached import reach

BATCH = 64
KEEPING = RunConfig(leave_out=False)
"""Both ranks report all steps here."""
DEFAULT = Settings(config=KEEPING, is_default=True)


def run_steps(
    chooser: PolicyChooser, exposed_s: float, steps: int = 200
) -> list[Instruction]:
    """What two ranks receive in an epoch: a sample takes 1 ms, or 2 on rank 1."""

    def report(grant: GrantSteps, rank: int) -> StepsDone:
        busy_s = [0.001 * (r + 1) * n for r, n in enumerate(grant.shares)]
        wait_s = max(busy_s) - busy_s[rank] + exposed_s
        wait_s *= grant.stop - grant.start
        return ran(grant, rank, busy_s[rank], sync_wait_s=wait_s)

    return [
        one for _, one in run_epoch(chooser, BatchSizes.of([BATCH] * steps), report)
    ]


def said(told: list[Instruction]) -> list[PolicyChosen]:
    return [each for each in told if isinstance(each, PolicyChosen)]


def test_it_is_said_once_and_changes_nothing_else() -> None:
    """A reduction that shows for seven times a step."""
    told = run_steps(policy_chooser(PAIR, DEFAULT), exposed_s=0.3)
    (line,) = said(told)
    assert line.rank == 0
    assert line.is_advice
    assert line.reason.startswith("policy='async' is predicted to train ")
    named = policy_chooser(PAIR, Settings(config=KEEPING))
    plain = run_steps(named, exposed_s=0.3)
    assert [each for each in told if each is not line] == plain


@pytest.mark.parametrize(
    ("settings", "exposed_s", "steps"),
    [
        (DEFAULT, 0.0, 200),
        (DEFAULT, 0.001, 200),
        (DEFAULT, 0.3, ADVICE_GRANTS),
        (Settings(config=KEEPING), 0.3, 200),
        (Settings(config=RunConfig(policy="sync", leave_out=False)), 0.3, 200),
    ],
    ids=["hidden", "short", "few steps", "named", "by name"],
)
def test_otherwise_it_is_silent(
    settings: Settings, exposed_s: float, steps: int
) -> None:
    assert not said(run_steps(policy_chooser(PAIR, settings), exposed_s, steps))


@pytest.mark.reaches("a line", "silence")
@given(
    seconds=st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=6),
    exposed=st.floats(0.0, 20.0),
    batches=st.integers(100, 50_000),
)
def test_no_gain_is_said_that_the_shown_wait_does_not_explain(
    seconds: list[float], exposed: float, batches: int
) -> None:
    """Windows save what shows of a reduction, and what whole samples leave idle."""
    cluster = MeasuredCluster(
        seconds_per_sample=seconds, batch_size=BATCH, sync_s=0.0, run_batches=batches
    )
    step = predict("sync", cluster)
    shown_s = exposed * step.window_s
    line = advice(
        MeasuredCluster(
            seconds_per_sample=seconds,
            batch_size=BATCH,
            sync_s=shown_s,
            run_batches=batches,
        )
    )
    reach("a line" if line else "silence")
    if line:
        gain = float(line.split(" times as fast")[0].rsplit(" ", 1)[1])
        most = (1.0 + exposed) / step.hardware_efficiency
        assert 1.1 <= gain <= most * 1.05
