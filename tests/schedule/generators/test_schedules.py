"""Every generator: complete, in order, within its memory, lowered without deadlock."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction, loop_placement
from elche.schedule.codes import decode, encode
from elche.schedule.costs import PipelineCosts, RankTimes, StageCost, equal_costs
from elche.schedule.formats import from_csv
from elche.schedule.generators.looped import gpipe_rows
from elche.schedule.generators.schedules import make_schedule
from elche.schedule.lowering import check_deadlock_free, lower
from elche.schedule.timing import simulate
from tests.schedule.strategies import assert_complete, named, placements


@given(named())
@settings(max_examples=30)
def test_lowered_schedules_run_as_the_others(
    case: tuple[str, PipelineCosts, int, int],
) -> None:
    name, costs, count, _ = case
    schedule = make_schedule(name, costs, count)
    lowered = lower(schedule, costs)
    assert_complete(lowered)
    plain, sent = simulate(schedule, costs), simulate(lowered, costs)
    assert (sent.makespan, sent.busy) == (plain.makespan, plain.busy)
    assert sent.peak_activations == plain.peak_activations
    assert_pairs_in_order(lowered)


@given(placements(), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_random_orders_are_proven_or_rejected(
    placed: tuple[tuple[int, ...], int], count: int, random: Random
) -> None:
    """Any order of the actions: lowered exactly if a run of it completes."""
    placement, ranks = placed
    rows = []
    for row in gpipe_rows(placement, ranks, count):
        forwards = [code for code in row if code & 7 == 0]
        backwards = [code for code in row if code & 7]
        random.shuffle(forwards)
        random.shuffle(backwards)
        rows.append([*forwards, *backwards])
    schedule = decode("random", rows, placement, count)
    assert encode(schedule) == rows
    if completes(schedule):
        assert_pairs_in_order(lower(schedule))
    else:
        with pytest.raises(ConfigError, match=r"deadlocks(.|\n)*rank \d stops at"):
            lower(schedule)


def completes(schedule: Schedule) -> bool:
    """Repeats until nothing moves: the plainest way to run it."""
    done: set[tuple[int, str, int]] = set()
    rows = [list(row) for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row:
                one = row[0]
                step = -1 if one.kind is Kind.FORWARD else 1
                needs = one.stage + step, one.kind.value, one.microbatch
                if 0 <= needs[0] < schedule.num_stages and needs not in done:
                    break
                done.add((one.stage, one.kind.value, one.microbatch))
                row.pop(0)
                moved = True
    return not any(rows)


def assert_pairs_in_order(lowered: Schedule) -> None:
    """Between two ranks, sends and receives are listed in the same order."""
    sent: dict[tuple[int, int], list[StageAction]] = {}
    received: dict[tuple[int, int], list[StageAction]] = {}
    for rank, row in enumerate(lowered.actions):
        for one in row:
            if one.kind in (Kind.SEND_F, Kind.SEND_B):
                forward = one.kind is Kind.SEND_F
                stage = one.stage + (1 if forward else -1)
                kind = Kind.RECV_F if forward else Kind.RECV_B
                pair = rank, lowered.placement[stage]
                sent.setdefault(pair, []).append(
                    StageAction(stage, kind, one.microbatch)
                )
            elif one.kind in (Kind.RECV_F, Kind.RECV_B):
                stage = one.stage + (-1 if one.kind is Kind.RECV_F else 1)
                pair = lowered.placement[stage], rank
                received.setdefault(pair, []).append(one)
    assert sent == received


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1B0\n", "lacks 0RECV_B0, 0SEND_F0, 1RECV_F0, 1SEND_B0"),
        ("0F0,0SEND_F0,0B0\n", "has but does not need 0SEND_F0"),
        (
            "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "if a send waits for its receive, .*0SEND_F0 needs 0F0",
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
            "if a send waits for its receive, .*1F0 needs 0SEND_F0",
        ),
    ],
)
def test_wrong_messages_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_deadlock_free(from_csv(text))


def test_lowering_twice_is_rejected() -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), loop_placement(2), 2)
    with pytest.raises(ConfigError, match="sends and receives already"):
        lower(lower(make_schedule("1f1b", costs, 2)))


@pytest.mark.parametrize(
    ("name", "placement", "count", "message"),
    [
        ("zb-v", (0, 1, 0, 1), 4, "zb-v is not defined for 4 stages"),
        ("1f1b", (0, 0), 4, "1f1b is not defined for 2 stages"),
        ("zb-h1", (0, 1, 0, 1), 4, "zb-h1 is not defined"),
        ("interleaved-1f1b", (0, 0, 1, 1), 4, "is not defined"),
        ("interleaved-zb", (0, 1, 0), 4, "is not defined"),
        ("interleaved-1f1b", (0, 1, 0, 1), 5, "2 equal rounds .* got 5 .* such as 4"),
        ("1f1b", (0, 1), 0, "microbatches to be an int >= 1, got 0"),
        ("2f2b", (0, 1), 4, "expected a schedule among gpipe"),
    ],
)
def test_schedules_that_do_not_exist(
    name: str, placement: tuple[int, ...], count: int, message: str
) -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), placement, 2)
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, costs, count)


@given(named(), st.randoms(use_true_random=False), st.integers(0, 2))
@settings(max_examples=25)
def test_ranks_may_stand_in_any_order(
    case: tuple[str, PipelineCosts, int, int], random: Random, idle: int
) -> None:
    """Devices in another order, some without a stage: the same schedule elsewhere."""
    name, costs, count, _ = case
    ranks = random.sample(range(costs.num_ranks + idle), costs.num_ranks)
    moved = replace(
        costs,
        placement=tuple(ranks[rank] for rank in costs.placement),
        num_ranks=costs.num_ranks + idle,
    )
    here, there = (make_schedule(name, each, count) for each in (costs, moved))
    assert [there.actions[rank] for rank in ranks] == list(here.actions)
    assert sum(map(len, there.actions)) == sum(map(len, here.actions))
    assert simulate(there, moved).makespan == simulate(here, costs).makespan


def test_memory_above_the_limit_is_rejected() -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), loop_placement(4), 4, memory=4)
    assert make_schedule("zb-h1", costs, 8).name == "zb-h1"
    with pytest.raises(ConfigError, match=r"zb-h2 holds up to 7 units .* limit of 4"):
        make_schedule("zb-h2", costs, 8)


def test_costs_of_another_placement_are_rejected() -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), loop_placement(2), 2)
    other = equal_costs(RankTimes(1.0, 1.0, 1.0), (1, 0), 2)
    with pytest.raises(ConfigError, match=r"the costs place stages on ranks \[1, 0\]"):
        simulate(make_schedule("1f1b", costs, 2), other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": ()}, "at least one stage"),
        ({"placement": (0,)}, "a rank for each of 2 stages"),
        ({"placement": (0, 2)}, "outside 0 to 1"),
        ({"links": (0.1, 0.1)}, "each of 1 links"),
        ({"links": (-0.1,)}, "link to be a finite number >= 0"),
        ({"memory": (1.0,)}, "each of 2 ranks"),
        ({"memory": (1.0, 0.0)}, "above 0"),
    ],
)
def test_impossible_costs(settings: dict[str, object], message: str) -> None:
    unit = StageCost(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    good = {"stages": (unit, unit), "placement": (0, 1), "num_ranks": 2}
    with pytest.raises(ConfigError, match=message):
        PipelineCosts(**{**good, **settings})  # type: ignore[arg-type]
