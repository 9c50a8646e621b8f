"""The ledger's account: every batch in one place, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from elche.coordination.batch_ranges import BatchSizes
from elche.coordination.ledger import EpochLedger
from elche.errors import ProtocolError, TransitionError
from tests.coordination.ledger_machine import LedgerMachine

STEPS = 40


@pytest.mark.hypothesis
@pytest.mark.reaches(
    "commits",
    "commits of what a dead rank had",
    "redone reductions",
    "leases given back",
    "deaths",
    "deaths in a reduction",
    "joins",
    "rejections",
    "rejections of a part",
    "revoked commits",
    "batches left out",
    "epochs left early",
    "resumed runs",
)
def test_every_batch_is_in_one_place_whatever_happens() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LedgerMachine, settings=settings(stateful_step_count=STEPS)
    )


def test_a_state_of_another_epoch_is_refused() -> None:
    state = EpochLedger(BatchSizes(((4, 3),)), [0]).state_dict()
    other = EpochLedger(BatchSizes(((4, 2),)), [0])
    with pytest.raises(TransitionError, match=r"but the state is of \(\(4, 3\),\)"):
        other.load_state_dict(state)


def test_a_ledger_that_has_begun_takes_no_state() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0])
    state = ledger.state_dict()
    ledger.lease(0, 1)
    with pytest.raises(TransitionError, match="before its first lease"):
        ledger.load_state_dict(state)


def test_nobody_takes_back_what_it_has_not_closed() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0])
    ledger.lease(0, 3)
    ledger.train(0, 0, 2)
    ledger.close(0)
    with pytest.raises(
        ProtocolError, match=r"takes back batches 1\.\.2, but has closed"
    ):
        ledger.reject(0, [(1, 3)])
    with pytest.raises(ProtocolError, match=r"back batches 0\.\.1, but committed are"):
        ledger.revoke(0, [(0, 2)])
    ledger.check()


def test_neighbours_are_taken_back_whatever_order_they_were_trained_in() -> None:
    """A batch that another rank gave back is trained on after the next one."""
    ledger = EpochLedger(BatchSizes(((4, 4),)), [0, 1])
    ledger.lease(1, 1)
    ledger.lease(0, 2)
    ledger.give_back(1)
    ledger.lease(0, 1)
    ledger.train(0, 1, 3)
    ledger.train(0, 0, 1)
    ledger.close(0)
    assert ledger.reject(0, [(0, 2)]) == ((0, 2),)
    assert ledger.parts(0) == ((2, 3),)
    assert ledger.pooled == 3
    ledger.check()
