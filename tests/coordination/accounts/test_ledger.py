"""The ledger's account: every batch in one place, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.ledger import EpochLedger
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


def test_discarded_batches_are_done() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0, 1])
    for holder in (0, 1):
        start, stop = ledger.lease(holder, 1)
        ledger.train(holder, start, stop)
        ledger.close(holder)
    assert ledger.discard(1) == ((1, 2),)
    ledger.remove(1)
    ledger.stage()
    ledger.commit()
    ledger.check()
    assert ledger.lease(0, 3) == (2, 3)
    assert not ledger.pooled
    assert (ledger.used_samples, ledger.committed_samples) == (4, 4)


def test_parts_of_all_that_are_gone_leave_a_reduction_that_is_redone() -> None:
    ledger = EpochLedger(BatchSizes(((4, 6),)), range(3))
    for holder in range(3):
        start, stop = ledger.lease(holder, 2)
        ledger.train(holder, start, stop)
        ledger.close(holder)
    ledger.stage()
    for holder in (0, 2):
        ledger.remove(holder)
    assert ledger.unstage_gone() == {0: 8, 2: 8}
    ledger.check()
    assert ledger.pooled_ranges() == ((0, 2), (4, 6))
    assert ledger.commit() == 8
