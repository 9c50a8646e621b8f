"""Where batches go when their rank is gone."""

from __future__ import annotations

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes, without
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.ledger import EpochLedger


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_a_lost_rank_closed_is_pooled_again_once(is_staged: bool) -> None:
    ledger = EpochLedger(BatchSizes(((4, 8),)), (0, 1))
    for rank in (0, 1):
        ledger.train(rank, *ledger.lease(rank, 2))
        ledger.close(rank)
    assert not is_staged or ledger.stage() == 16
    ledger.remove(1)
    assert ledger.unstage_gone() == ({1: 8} if is_staged else {})
    ledger.commit()
    ledger.check()
    assert (ledger.pooled, ledger.used_samples) == (6, 8)


def test_a_range_loses_what_others_have_of_it() -> None:
    assert without([(5, 10)], [(0, 2), (6, 7), (9, 12)]) == [(5, 6), (7, 9)]


def test_a_batch_that_is_moved_to_the_device_is_not_waited_for() -> None:
    cost = BatchCost.measured(8, (1.0, 4.0, 9.0), 2.0, 0.5)
    assert (cost.busy_s, cost.data_wait_s, cost.transfer_s) == (7.5, 1.0, 2.0)
