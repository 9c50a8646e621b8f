"""The ledger's account: every batch in one place, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.coordination.accounts.ledger_machine import LedgerMachine

STEPS = 40


@pytest.mark.hypothesis
@pytest.mark.reaches(
    "commits",
    "commits of what a dead rank had",
    "redone reductions",
    "leases given back",
    "deaths",
    "deaths in a reduction",
    "discarded updates",
    "epochs left early",
    "epochs that were done",
)
def test_every_batch_is_in_one_place_whatever_happens() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LedgerMachine, settings=settings(stateful_step_count=STEPS)
    )
