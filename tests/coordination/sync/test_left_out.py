"""Who may be left out of steps, and the one line that says why nobody is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.config import RunConfig
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.protocol.instructions import LeaveOut
from elche.coordination.sync import left_out
from elche.coordination.sync.left_out import ExcludedRanks
from elche.coordination.sync.step_reports import RATE_MOVES, STALE, UNEVEN
from elche.coordination.sync.step_shares import StepShares
from tests.coordination.test_core import steps_done
from tests.harness.settings import nested

SLOW_S = 0.2


class Core:
    """Ranks whose steps are measured, the last one slow."""

    def __init__(self, world: int = 2, wait_s: float = 0.0, **options: Any) -> None:
        agreed = Settings(config=RunConfig(**nested(options)))
        self.ranks = list(range(world))
        self.shares = StepShares(agreed, self.ranks)
        self.left_out = ExcludedRanks(self.ranks, agreed, self.shares)
        self.now_s = 0.0
        self.slow_s, self.wait_s = SLOW_S, wait_s
        self.slow_sample_s = self.fixed_s = 0.0
        self.reduce_s = 0.0  # of busy time, unless a rank is alone
        self.parts: list[tuple[int, ...]] = []  # of each step

    def epoch(self, number: int, steps: int = 100, unknown: str = "") -> list[LeaveOut]:
        """An epoch of steps of 32 samples that take a millisecond each."""
        sizes = BatchSizes(((32, steps),))
        told = self.left_out.begin_epoch(number, sizes, self.now_s)
        for step in range(steps):
            if self.left_out.is_leaving:
                told += self.left_out.leave()
            parts = self.shares.of(32, max(self.ranks) + 1)
            self.parts.append(parts)
            busy_s = [self.fixed_s + 0.001 * part for part in parts]
            busy_s[-1] += self.slow_s + self.slow_sample_s * parts[-1]
            are_several = len(self.left_out.ranks) < len(self.ranks) - 1
            reduce_s = self.reduce_s * are_several
            done = [
                steps_done(
                    *(rank, step, step + 1),
                    samples=parts[rank],
                    busy_s=busy_s[rank] + reduce_s,
                    reduce_s=reduce_s,
                    sync_wait_s=self.wait_s,
                    unknown=unknown,
                )
                for rank in self.ranks
                if rank not in self.left_out.ranks
            ]
            for each in done:
                self.left_out.unknown[each.rank] = each.unknown
            self.shares.measured(done, 1)
            told += self.left_out.measured(done, 1, steps - step - 1, self.now_s)
            self.now_s += max(each.busy_s for each in done)
        return told


def reasons(told: list[LeaveOut]) -> list[str]:
    return [one.reason for one in told if one.reason and one.rank == 0]


def test_a_rank_that_brings_nothing_is_left_out_until_it_is_as_fast_again() -> None:
    core = Core()
    (line,) = reasons(core.epoch(0))
    assert core.left_out.ranks == (1,)
    assert "rank 1 excluded: steps of 201 ms take 32 ms without it (6.2" in line
    core.slow_s = 0.0
    lines = [line for number in range(1, 40) for line in reasons(core.epoch(number))]
    assert core.left_out.ranks == ()
    assert lines == ["rank 1 takes part again: 2.00 times as fast"]


@pytest.mark.parametrize(("wait_s", "steps"), [(0.1, 12), (0.8, 8)])
def test_few_long_steps_are_enough_to_leave_a_rank_out(
    wait_s: float, steps: int
) -> None:
    """Once: 13 s with a rank behind a link of 100 Mbit/s, at 0.85 s a step."""
    core = Core(wait_s=wait_s)
    core.slow_s = 0.02
    (line,) = reasons(core.epoch(0))
    assert "rank 1 excluded" in line
    assert core.parts.index((32, 0)) == steps


@pytest.mark.parametrize("fixed_s", [0.0, 0.1])
@pytest.mark.parametrize("hints", [None, (1.0, 0.01)])
def test_a_trial_forgets_how_slow_a_rank_was(
    hints: tuple[float, ...] | None, fixed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the least share in trials, whose fixed time did not show the speed."""
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    core = Core(speed_hints=hints)
    core.slow_sample_s, core.fixed_s = 0.01, fixed_s
    core.epoch(0)
    assert core.left_out.ranks == (1,)
    core.slow_s = core.slow_sample_s = 0.0
    core.epoch(1)
    assert core.parts[100:102] == [(31, 1), (16, 16)]
    assert core.left_out.ranks == ()


def test_a_trial_that_fails_as_its_epoch_ends_excludes_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it said nothing, and the slow rank was measured from the beginning."""
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    core = Core()
    core.epoch(0)
    assert reasons(core.epoch(1, steps=9)) == []
    assert core.left_out.ranks == ()
    core.parts.clear()
    core.epoch(2)
    assert core.parts.index((32, 0)) == 1


def test_an_exclusion_that_was_wrong_is_tried_again_at_once() -> None:
    core = Core()
    core.epoch(0)
    assert core.left_out.ranks == (1,)
    core.left_out._steps_left = 1000
    assert not core.left_out.is_trial_due
    core.left_out._chosen = left_out._Exclusion((1,), with_s=0.03, without_s=0.032)
    assert not core.left_out.is_trial_due, "within the noise"
    core.left_out._chosen = left_out._Exclusion((1,), with_s=0.03, without_s=0.04)
    assert core.left_out.is_trial_due
    core.left_out._steps_left = 2
    assert not core.left_out.is_trial_due, "the epoch is over"


def test_a_rank_alone_saves_the_reductions_that_are_in_its_compute_time() -> None:
    """Once: 0.61 of the fast device, because a loader was slow on the other one."""
    core = Core()
    core.slow_s, core.reduce_s = 0.01, 0.02  # a step takes 32 ms alone, else 43
    (line,) = reasons(core.epoch(0))
    assert core.left_out.ranks == (1,)
    assert "1 excluded: steps of 42.8 ms take 33.7" in line
    core.slow_s, core.reduce_s = 0.0, 0.01  # now 26 ms
    lines = [line for number in range(1, 40) for line in reasons(core.epoch(number))]
    assert lines == ["rank 1 takes part again: 1.23 times as fast"]
    assert core.left_out.ranks == ()


def test_all_keep_a_share_where_state_would_stay_behind() -> None:
    """Which is said once, with what it costs."""
    core, why = Core(), "SyncBatchNorm layers need every rank"
    (line,) = reasons(core.epoch(0, unknown=why) + core.epoch(1, unknown=why))
    assert line.startswith("steps are predicted to be 6.")
    assert line.endswith(f" times as fast without rank 1, but all keep a share: {why}")
    assert core.left_out.ranks == ()


def test_all_stay_where_state_is_seen_in_an_epochs_first_step() -> None:
    """Nobody is behind there. Once: its average of weights stood still unsaid."""
    core, why = Core(), "elche does not know of the AveragedModel (copies=[...])"
    core.epoch(0)
    assert core.left_out.ranks == (1,)
    told = core.epoch(1, unknown=why)
    assert [one.left_out for one in told if one.rank == 0] == [(), ()]
    (line,) = reasons(told)
    assert line.endswith(f"without rank 1, but all keep a share: {why}")
    assert core.epoch(2, unknown=why) == []


UNKNOWN = "", *STALE, "SyncBatchNorm layers need every rank"
SLOWNESS, STATE = st.sampled_from([0.0, SLOW_S]), st.sampled_from(UNKNOWN)
EPOCH = st.tuples(st.integers(1, 120), SLOWNESS, STATE, st.booleans())


@given(st.lists(EPOCH, min_size=1, max_size=6))
@settings(max_examples=40)
def test_a_rank_that_lacks_state_never_has_a_share_again(
    epochs: list[tuple[int, float, str, bool]],
) -> None:
    """Also where another rank dies; and nobody leaves where every rank is needed."""
    core, members, seen = Core(4), {0, 1, 2, 3}, ""
    gone: set[int] = set()
    for number, (steps, slow_s, unknown, dies) in enumerate(epochs):
        core.slow_s = slow_s
        seen = unknown if seen in ("", *STALE) and unknown else seen
        before = core.left_out.ranks
        core.epoch(number, steps, seen)
        assert 0 not in core.left_out.ranks
        if seen == UNKNOWN[-1]:
            assert gone or set(core.left_out.ranks) <= set(before)
        gone |= set(core.left_out.final)
        assert set(core.left_out.final) == gone & members
        if dies and 1 in members:
            members, core.ranks = {0, 2, 3}, [0, 2, 3]
            core.shares.follow(core.ranks)
            core.left_out.reset(core.ranks)
            core.left_out.unknown.pop(1, None)
        core.left_out.begin_epoch(number + 1, BatchSizes(((32, 9),)), core.now_s)
        shares = core.shares.of(32, 4)
        assert [rank for rank in gone & members if shares[rank]] == []
        assert sum(shares) == 32


def test_a_rate_that_moves_while_a_rank_is_tried_ends_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second step on the rank would train with another rate."""
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    core = Core()
    core.epoch(0)
    core.slow_s = 0.0
    (line,) = reasons(core.epoch(1, unknown=RATE_MOVES))
    assert f"none returns, because {RATE_MOVES} (leave_out=False" in line
    assert core.left_out.ranks == core.left_out.final == (1,)


def test_no_trial_within_an_epoch_where_the_loop_may_step_by_its_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The count of an excluded rank is behind until the next epoch."""
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    core = Core()
    core.epoch(0, unknown=UNEVEN)
    core.slow_s = 0.0
    assert core.left_out.ranks == (1,)
    core.left_out._steps_left = 1000
    assert not core.left_out.is_trial_due
    core.epoch(0, unknown=UNEVEN)  # the rest of an epoch that was cut
    assert core.left_out.ranks == (1,)
    core.epoch(1, unknown=UNEVEN)
    assert core.left_out.ranks == ()


def test_trials_that_fail_come_at_growing_intervals() -> None:
    core, tried_s = Core(), list[float]()
    core.epoch(0, steps=60)
    while len(tried_s) < 5:
        core.now_s += 1.0
        core.left_out._now_s, core.left_out._steps_left = core.now_s, 10**6
        if core.left_out.is_trial_due:
            tried_s.append(core.now_s)
            core.epoch(0, steps=60)
    waits_s = [after - before for before, after in itertools.pairwise(tried_s)]
    assert all(b >= 1.9 * a for a, b in itertools.pairwise(waits_s)), waits_s


def test_a_trial_that_is_slower_ends_where_no_prediction_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_out, "TRIAL_COST", math.inf)
    core = Core()
    core.epoch(0)
    monkeypatch.setattr(ExcludedRanks, "_shorter", lambda ranks, step_s: None)
    lines = [line for number in range(1, 4) for line in reasons(core.epoch(number))]
    assert core.left_out.ranks == (1,)
    assert lines == []


def test_later_predictions_are_as_far_off_as_the_last_one() -> None:
    core = Core(3, wait_s=0.016)
    core.epoch(0)
    assert core.left_out.ranks == (2,)
    step_s = core.left_out._chosen.without_s
    assert step_s == pytest.approx(0.032)
    core.left_out._recent.append(left_out._Measured(1, step_s, 0.0))
    predicted = core.left_out._without((2,), step_s)
    assert predicted.without_s == pytest.approx(step_s, rel=0.01)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_change_of_the_membership_forgets_who_brought_nothing(
    is_changed: bool,
) -> None:
    core = Core()
    core.epoch(0, steps=40)
    if is_changed:
        core.left_out.reset([0, 1])
    assert core.left_out.is_on == bool(core.left_out.ranks) == (not is_changed)
    core.left_out.begin_epoch(1, BatchSizes(((32, 100),)), core.now_s)
    assert core.left_out.is_trying == (not is_changed)


def test_nobody_may_die_until_all_have_run_a_step_in_the_same_group() -> None:
    """Some may not have heard yet that a rank is left out, or takes part again."""
    core = Core()
    assert core.left_out.changing == ()
    core.epoch(0)
    assert core.left_out.changing == core.left_out.ranks == (1,)
    core.left_out.changing = ()
    core.left_out.begin_epoch(1, BatchSizes(((32, 100),)), core.now_s)
    assert core.left_out.changing == (1,)
    assert core.left_out.ranks == ()


@pytest.mark.parametrize(
    ("options", "carrying_s"),
    [
        ({"leave_out": False}, 0.0),
        ({"deterministic": True}, 0.0),
        ({"policy": "auto"}, 0.0),
        ({}, 30.0),
    ],
    ids=["kept", "deterministic", "auto", "too short to gain by it"],
)
def test_nobody_is_ever_left_out(options: dict[str, Any], carrying_s: float) -> None:
    core = Core(**options)
    core.left_out.carrying_s = carrying_s
    assert core.epoch(0) + core.epoch(1) == []


def test_a_trial_that_is_due_ends_in_short_epochs_too() -> None:
    """It went on over epochs once more, so every second one was a trial."""
    core, tried = Core(), []
    for number in range(1200):
        core.epoch(number, steps=6)
        tried.append(core.left_out.is_trying)
    assert any(tried[:600]), "no trial was due"
    assert sum(tried) < 0.05 * len(tried)
