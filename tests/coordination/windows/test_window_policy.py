"""What the window policies take from a measured window, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.policy import Member
from elche.coordination.protocol.events import BatchesDone, EpochLeft
from elche.coordination.windows.window_policy import WindowPolicy
from elche.coordination.windows.window_state import FixedWindows
from tests.coordination.test_core import batch_done, closed, reduced

RANKS = (0, 1)
BATCH_S = (0.1, 0.4)
HORIZON = 12
"""Batches that each loader draws ahead: no lease is late in these few windows."""


class Driven:
    """Two ranks that do as many batches in a window as they are told to.

    Args:
        policy: its name.
        batches: of the epoch.
    """

    def __init__(self, policy: str, batches: int) -> None:
        members = [Member(rank, "cpu", HORIZON) for rank in RANKS]
        self.policy = WindowPolicy(RunConfig(policy=policy), members, None)
        self.pacing = self.policy.state.pacing
        self.now_s, self.window = 0.0, 0
        self.policy.begin_epoch(0, BatchSizes(((8, batches),)), 0.0)

    def run_window(self) -> None:
        """A batch of the slow rank, four of the fast one; then both close."""
        for rank, count in zip(RANKS, (4, 1), strict=True):
            for _ in range(count):
                start = self.policy.state.ledger._holdings[rank].leased[0][0]
                self._tell(self._done(rank, start))
        self.now_s += BATCH_S[1]
        for rank in RANKS:
            self._tell(closed(rank, self.window))
        self.window += 1

    def reduced(self, after_s: float, **said: Any) -> None:
        """Both have the result of the window that was closed last."""
        self.now_s += after_s
        for rank in RANKS:
            result = reduced(rank, self.window - 1)
            self._tell(replace(result, **{"sync_s": 0.0, **said}))

    def _done(self, rank: int, batch: int) -> BatchesDone:
        took_s = BATCH_S[rank]
        times = {"window": self.window, "busy_s": took_s, "timed_s": took_s}
        return batch_done(rank, batch, **times)

    def _tell(self, event: Any) -> None:
        self.policy.handle(event, self.now_s)
        self.policy.check()


@pytest.mark.parametrize(("batches", "is_tail"), [(200, False), (24, True)])
def test_a_window_after_which_nothing_is_pooled_says_nothing_of_its_cost(
    batches: int, is_tail: bool
) -> None:
    """Ranks end an epoch at other times than a window, and wait for each other."""
    driven = Driven("cadence", batches)
    for _ in range(3):
        driven.run_window()
        driven.reduced(0.4, sync_s=0.4)
    state = driven.policy.state
    assert state.has_work  # so it is not the last window, whatever the pool holds
    assert (state.ledger.pooled == 0) == is_tail
    assert (driven.pacing.el_che.anchor == 1) == is_tail


@pytest.mark.parametrize(("adopted_at", "reduction_s"), [(0, 0.35), (3, 0.30)])
def test_a_result_that_came_during_a_batch_is_dated_to_its_middle(
    adopted_at: int, reduction_s: float
) -> None:
    """It is seen when the batch ends, half a batch too late on average."""
    driven = Driven("async", 200)
    driven.run_window()
    driven.reduced(0.35, adopted_at=adopted_at)
    assert driven.pacing.reduction_s == pytest.approx(reduction_s)


@pytest.mark.parametrize(("reduced", "samples"), [(-1, 32), (0, 40)])
def test_progress_counts_a_dead_ranks_part_where_a_survivor_holds_it(
    reduced: int, samples: int
) -> None:
    driven = Driven("cadence", 200)
    driven.run_window()
    assert driven.policy.state.progress_samples == 40
    driven.policy.remove(1)
    driven.policy.regrouped({0: reduced}, driven.now_s)
    driven.policy.check()
    assert driven.policy.state.progress_samples == samples
    ledger = driven.policy.state.ledger
    left_s = BATCH_S[0] * (ledger.pooled + ledger.total_leased)
    assert driven.policy.state.leasing.work_s == pytest.approx(left_s)


def test_nobody_trains_on_what_a_dead_rank_held_where_the_epoch_ends_early() -> None:
    driven = Driven("cadence", 200)
    driven.policy.handle(EpochLeft(rank=0, epoch=0, step=0), 0.0)
    driven.policy.remove(1)
    driven.policy.check()
    assert not driven.policy.state.has_work
    assert driven.policy.positions_left == ((0, 1600),)


def test_a_fixed_plan_says_what_was_trained_before_each_window() -> None:
    plan = FixedWindows(
        sizes=BatchSizes(((4, 7),)),
        ranks=[0, 2],
        counts=[2, 1],
        committed_samples=100,
        first_window=5,
    )
    seen = [plan.window(number) for number in (5, 6, 7, 8)]
    assert [each.committed_samples for each in seen] == [100, 112, 124, 128]
    assert [each.planned_samples for each in seen] == [12, 12, 4, 0]
    assert [each.parts[2] for each in seen] == [(2, 3), (5, 6), (7, 7), (7, 7)]
    assert [each.batches(0) for each in seen] == [2, 2, 1, 0]
