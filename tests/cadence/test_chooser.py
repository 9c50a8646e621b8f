"""What ``auto`` picks: by predicted goodput, and it stays."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.cadence.chooser import MARGIN, PATIENCE, SAMPLE_COST_SAFETY, Chooser
from elche.cadence.convergence import UPDATES
from elche.cadence.goodput import Fleet, MeasuredCluster, Prediction, predict
from tests.harness.reached import reach
from tests.harness.work import lines_run

BATCH = 32
FAST_BATCH_S = 0.04
POLICIES = list(UPDATES)


def cluster(*speeds: float, sync_s: float, **more: Any) -> MeasuredCluster:
    """Ranks of these relative speeds, of which 1.0 takes 40 ms for a batch of 32."""
    seconds = [FAST_BATCH_S / BATCH / speed for speed in speeds]
    return MeasuredCluster(
        seconds_per_sample=seconds, batch_size=BATCH, sync_s=sync_s, **more
    )


@st.composite
def clusters(draw: st.DrawFn, most_ranks: int = 6) -> MeasuredCluster:
    ranks = draw(st.integers(1, most_ranks))
    speeds = draw(st.lists(st.floats(0.05, 1.0), min_size=ranks, max_size=ranks))
    return cluster(
        *speeds,
        sync_s=FAST_BATCH_S * 10.0 ** draw(st.floats(-2.0, 2.0)),
        fixed_s=draw(
            st.just([])
            | st.lists(st.floats(0.0, FAST_BATCH_S), min_size=ranks, max_size=ranks)
        ),
    )


def at_worst(found: Prediction) -> float:
    """Goodput where windows cost half as many samples again as the table says."""
    if found.policy == "sync":
        return found.goodput
    worst = 1.0 / (1.0 + SAMPLE_COST_SAFETY * (1.0 / found.sample_efficiency - 1.0))
    return found.goodput * worst / found.sample_efficiency


@pytest.mark.parametrize(
    ("speeds", "sync_s", "expected"),
    [
        ((1.0,), 0.5, "sync"),
        ((1.0, 0.25), 0.001, "sync"),
        ((1.0, 0.25), 0.006, "sync"),
        ((1.0, 0.25), 0.03, "async"),
        ((1.0, 0.25), 0.317, "async"),
        ((1.0, 0.5), 0.1, "async"),
        ((1.0,) * 8, 0.001, "sync"),
        ((1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25), 0.004, "sync"),
        ((1.0, 1.0, 1.0, 1.0), 0.008, "sync"),
        ((1.0, 1.0, 1.0, 1.0), 0.02, "async"),
    ],
)
def test_the_policy_follows_ranks_and_link(
    speeds: tuple[float, ...], sync_s: float, expected: str
) -> None:
    choice = Chooser().choose(cluster(*speeds, sync_s=sync_s))
    assert (choice.policy, choice.excluded) == (expected, ())
    assert choice.reason.startswith(f"{expected} on ")


def test_the_reason_holds_the_numbers() -> None:
    choice = Chooser().choose(cluster(1.0, 0.25, sync_s=0.317))
    assert choice.reason == (
        "async on 2 ranks: predicted 1.12 times the fastest device alone (hardware "
        "efficiency 1.00, sample efficiency 0.90, windows of 0.801 s, 5 batches of the "
        "slowest rank); sync 1.00 on 1 rank; cadence 1.00 on 1 rank"
    )
    assert (choice.anchor, choice.prediction.anchor) == (3, 5)
    near = Chooser().choose(cluster(1.0, 0.25, sync_s=0.006))
    assert near.reason.endswith("; cadence 1.17; async 1.19, not clearly better")


@given(clusters(most_ranks=40))
@settings(max_examples=200)
def test_the_first_choice_is_near_the_best_and_above_one_device(
    measured: MeasuredCluster,
) -> None:
    choice = Chooser().choose(measured)
    found = choice.prediction
    assert found.policy == choice.policy
    assert found.goodput >= 1.0 - 1e-9
    best = max((predict(p, measured) for p in POLICIES), key=lambda each: each.goodput)
    least = best.goodput if found.policy != "sync" else at_worst(best)
    assert found.goodput * (1.0 + MARGIN) ** 2 >= least
    kept = [r for r in range(measured.world_size) if r not in choice.excluded]
    fleet = Fleet(measured, kept, drops=True)
    assert found == fleet.predict(choice.policy, len(kept))
    slowest_kept = max(measured.batch_s(rank) for rank in kept)
    assert all(measured.batch_s(rank) >= slowest_kept for rank in choice.excluded)


@pytest.mark.reaches("sync", "others")
@given(clusters())
def test_sync_is_preferred_unless_another_is_clearly_better(
    measured: MeasuredCluster,
) -> None:
    chooser, fleet = Chooser(), Fleet(measured, drops=True)
    choice = chooser.choose(measured)
    reach("sync" if choice.policy == "sync" else "others")
    if choice.policy == "sync":
        mine = choice.prediction
        windows = (chooser._sized(fleet, policy) for policy in POLICIES[1:])
        best = max(windows, key=lambda found: found.goodput)
        is_unsure = at_worst(best) < mine.goodput
        assert best.goodput < (1.0 + MARGIN) * mine.goodput or is_unsure
    else:
        sync = chooser._sized(fleet, "sync")
        assert choice.prediction.goodput >= (1.0 + MARGIN) * sync.goodput
        assert at_worst(choice.prediction) >= sync.goodput * (1.0 - 1e-12)


@pytest.mark.parametrize(
    ("doubt", "expected"), [(0.05, "async"), (0.3, "async"), (0.5, "sync")]
)
def test_windows_must_be_better_than_times_are_known(
    doubt: float, expected: str
) -> None:
    measured = cluster(1.0, 0.9, sync_s=0.015, doubt=doubt)
    gain = predict("async", measured).goodput / predict("sync", measured).goodput
    assert 1.15 < gain < 1.25
    assert Chooser().choose(measured).policy == expected


def test_a_link_that_becomes_ten_times_slower_is_followed() -> None:
    chooser = Chooser()
    speeds = (1.0, 1.0, 0.5, 0.5)
    for _ in range(20):
        choice = chooser.choose(cluster(*speeds, sync_s=0.002))
    assert choice.policy == "sync"
    first = chooser.choose(cluster(*speeds, sync_s=0.02), PATIENCE)
    assert first.policy == "sync"
    second = chooser.choose(cluster(*speeds, sync_s=0.02), PATIENCE)
    assert second.policy == "async"
    assert "; until now sync on 4 ranks, 1." in second.reason


def test_one_slow_reduction_changes_nothing() -> None:
    chooser = Chooser()
    for sync_s in (0.006, *(0.06, 0.006) * 10):
        choice = chooser.choose(cluster(1.0, 0.25, sync_s=sync_s), PATIENCE)
        assert choice.policy == "sync"


@pytest.mark.parametrize(
    ("update", "policies"),
    [("gradients", {"sync"}), ("parameters", {"cadence", "async"})],
)
def test_the_update_rule_restricts_the_policies(
    update: str, policies: set[str]
) -> None:
    for sync_s in (0.0, 0.003, 0.03, 0.3, 3.0):
        chooser = Chooser()
        chooser.fix_update(update)
        choice = chooser.choose(cluster(1.0, 0.5, 0.5, sync_s=sync_s))
        others = {p for p in POLICIES if f"; {p} " in choice.reason}
        assert {choice.policy, *others} == policies


def test_an_update_rule_that_forbids_the_choice_changes_it_at_once() -> None:
    chooser = Chooser()
    assert chooser.choose(cluster(1.0, 0.25, sync_s=0.001)).policy == "sync"
    chooser.fix_update("parameters")
    choice = chooser.choose(cluster(1.0, 0.25, sync_s=0.001))
    assert choice.policy == "cadence"


def test_sync_is_left_for_the_fastest_rank_alone_only_by_the_margin() -> None:
    """There is no way back."""
    chooser = Chooser()
    assert chooser.choose(cluster(1.0, 1.0, sync_s=0.001)).policy == "sync"
    chooser.fix_update("gradients")
    choice = chooser.choose(cluster(1.0, 1.0, sync_s=0.0339))
    assert 0.98 < choice.prediction.goodput < 0.99
    assert choice.excluded == ()
    choice = chooser.choose(cluster(1.0, 1.0, sync_s=0.036))
    assert choice.excluded == (1,)


def test_all_ranks_take_part_where_none_may_be_left_out() -> None:
    measured = cluster(1.0, 1.0, 0.002, sync_s=0.006)
    choice = Chooser(leaves_out=False).choose(measured)
    assert choice.excluded == ()
    assert choice.prediction.world_size == 3


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_ranks_that_cost_more_than_they_bring_are_left_out(slow: int) -> None:
    speeds = [1.0, 0.9, 0.8] + [0.002] * slow
    choice = Chooser().choose(cluster(*speeds, sync_s=0.02))
    assert choice.excluded == tuple(range(3, 3 + slow))
    assert "excluded: rank 3" in choice.reason
    assert ", which would slow the run (predicted with all " in choice.reason
    assert choice.prediction.world_size == 3


def test_one_device_alone_is_named_as_that_whatever_policy_carries_it_out() -> None:
    choice = Chooser().choose(cluster(1.0, 0.02, sync_s=2.0))
    assert (choice.policy, choice.carried_out_by) == ("sync", "async")
    assert choice.reason.startswith("training on one device alone: predicted 1.00 ")
    assert "excluded: rank 1, which would slow the run (predicted" in choice.reason
    assert (
        Chooser().choose(cluster(1.0, sync_s=0.0)).reason.startswith("sync on 1 rank: ")
    )


def test_a_rank_that_becomes_slow_is_left_out_and_comes_back() -> None:
    chooser = Chooser()
    assert chooser.choose(cluster(1.0, 1.0, sync_s=0.006)).excluded == ()
    assert chooser.choose(cluster(1.0, 0.002, sync_s=0.006)).excluded == (1,)
    assert chooser.choose(cluster(1.0, 1.0, sync_s=0.006)).excluded == ()


def test_another_number_of_ranks_is_a_new_choice() -> None:
    chooser = Chooser()
    chooser.choose(cluster(1.0, 0.002, sync_s=0.006))
    choice = chooser.choose(cluster(1.0, 1.0, 1.0, sync_s=0.006))
    assert choice.excluded == ()


def test_a_large_fleet_leaves_out_by_jumps_and_says_how_many() -> None:
    speeds = [1.0 + 0.001 * (rank % 97) for rank in range(990)] + [1e-4] * 10
    choice = Chooser().choose(cluster(*speeds, sync_s=0.5, sync_batch_size=32_000))
    assert choice.excluded == tuple(range(990, 1000))
    assert "excluded: rank 990, 991, 992, 993 and 6 more" in choice.reason


def test_a_choice_costs_a_hundred_lines_for_each_rank() -> None:
    """As many for each of 2000 as of 200; ten thousand take 0.05 s on an idle core."""
    rng = random.Random(3)
    for ranks in (200, 2000):
        speeds = [
            rng.choice((1.0, 0.7, 0.4)) * rng.uniform(0.9, 1.1) for _ in range(ranks)
        ]
        measured = cluster(*speeds, sync_s=0.5, sync_batch_size=32 * ranks)
        chooser = Chooser()
        lines = lines_run(lambda c=chooser, m=measured: c.choose(m))
        assert lines < 130 * ranks
