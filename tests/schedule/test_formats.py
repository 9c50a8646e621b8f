"""Text and CSV, and torch.distributed.pipelining on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction, loop_placement
from elche.schedule.codes import check_schedule, decode
from elche.schedule.costs import PipelineCosts, RankTimes, equal_costs
from elche.schedule.formats import from_csv, to_csv
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    make_schedule,
    placement_for,
)
from elche.schedule.generators.v_shape import zb_v_rows
from elche.schedule.lowering import check_deadlock_free, lower
from tests.schedule.strategies import named

TORCH_WAITS = hasattr(torch_schedules, "_add_wait_send")  # torch 2.15


def made(name: str, ranks: int = 4, count: int = 8) -> Schedule:
    placement = placement_for(name, ranks)
    return make_schedule(
        name, equal_costs(RankTimes(1.0, 1.0, 1.0), placement, ranks), count
    )


def torch_reader(schedule: Schedule) -> Any:
    """A schedule of torch that has everything its CSV reader uses, and no stages."""
    reader = object.__new__(_PipelineScheduleRuntime)
    reader.pipeline_order = {}
    reader.pp_group_size = schedule.num_ranks
    reader._num_stages = schedule.num_stages
    reader._n_microbatches = schedule.num_microbatches
    reader._stages = []
    reader._max_active_stages = 3  # torch 2.15 reads these three as well
    reader._unshard_lookahead = "full"
    reader._max_outstanding_sends = None
    return reader


@given(named())
@settings(max_examples=30)
def test_csv_returns_what_was_written(
    case: tuple[str, PipelineCosts, int, int],
) -> None:
    name, costs, count, _ = case
    schedule = make_schedule(name, costs, count)
    for one in (schedule, lower(schedule, costs)):
        assert from_csv(to_csv(one), name) == one


@pytest.mark.parametrize("name", FIXED_SCHEDULES)
def test_torch_loads_our_csv(tmp_path: Path, name: str) -> None:
    schedule = made(name)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule), newline="")
    reader = torch_reader(schedule)
    PipelineScheduleMulti._load_csv(reader, str(path))
    assert reader.pipeline_order == {
        rank: [_Action.from_str(str(one)) for one in row]
        for rank, row in enumerate(schedule.actions)
    }
    assert (
        tuple(reader.stage_index_to_group_rank[s] for s in range(schedule.num_stages))
        == schedule.placement
    )


@pytest.mark.skipif(TORCH_WAITS, reason="torch 2.15 demands waits for sends")
@pytest.mark.parametrize("name", FIXED_SCHEDULES)
def test_torch_runs_our_sends_and_receives(tmp_path: Path, name: str) -> None:
    """torch's own simulation, which demands matching sends and receives, completes."""
    schedule = lower(made(name))
    path = tmp_path / "lowered.csv"
    path.write_text(to_csv(schedule), newline="")
    reader = torch_reader(schedule)
    _PipelineScheduleRuntime._load_csv(reader, str(path), format="compute_comms")
    loaded = reader.pipeline_order_with_comms
    assert {rank: len(row) for rank, row in loaded.items()} == {
        rank: len(row) for rank, row in enumerate(schedule.actions)
    }
    simulated = _simulate_comms_compute(
        loaded, lambda stage: schedule.placement[stage], schedule.num_stages
    )
    assert sum(one is not None for row in simulated.values() for one in row) == sum(
        map(len, schedule.actions)
    )


def test_we_load_what_torch_dumps(tmp_path: Path) -> None:
    schedule = made("interleaved-zb")
    reader = torch_reader(schedule)
    orders = {
        rank: [None, *(_Action.from_str(str(one)) for one in row), None]
        for rank, row in enumerate(schedule.actions)
    }
    reader.pipeline_order = orders
    path = tmp_path / "torch.csv"
    _PipelineScheduleRuntime._dump_csv(reader, str(path), format="compute_only")
    assert from_csv(path.read_text(), "interleaved-zb") == schedule

    compute = {rank: [one for one in row if one] for rank, row in orders.items()}
    reader.pipeline_order_with_comms = _add_send_recv(
        compute, lambda stage: schedule.placement[stage], schedule.num_stages
    )
    if TORCH_WAITS:
        reader.pipeline_order_with_comms = torch_schedules._add_wait_send(
            reader.pipeline_order_with_comms
        )
    _PipelineScheduleRuntime._dump_csv(reader, str(path), format="compute_comms")
    lowered = from_csv(path.read_text(), "torch")
    check_deadlock_free(lowered)
    for ours, theirs in zip(lower(schedule).actions, lowered.actions, strict=True):
        assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("interleaved-1f1b", ScheduleInterleaved1F1B),
        ("interleaved-zb", ScheduleInterleavedZeroBubble),
        ("zb-v", ScheduleZBVZeroBubble),
    ],
)
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (3, 7), (4, 6), (4, 8), (4, 12)])
def test_the_order_is_torchs(name: str, theirs: type, ranks: int, count: int) -> None:
    if name != "zb-v":
        count -= count % max(1, count // ranks)
    schedule = made(name, ranks, count)
    if name == "zb-v":  # as published, before W goes where the costs leave gaps
        rows = zb_v_rows(ranks, count)
        schedule = decode(name, rows, schedule.placement, count)
    reader = object.__new__(theirs)
    reader.pp_group_size, reader.n_local_stages = ranks, 2
    reader.num_stages, reader._n_microbatches = 2 * ranks, count
    reader.microbatches_per_round = count // max(1, count // ranks)
    for rank, row in enumerate(schedule.actions):
        order = reader._calculate_single_rank_operations(rank)
        assert [str(one) for one in order if one] == list(map(str, row))


def test_torchs_idle_steps_overlaps_fsdp_and_waits_are_understood() -> None:
    text = "0UNSHARD,0F0,0F1,,(0B0;0B1)OVERLAP_F_B,0REDUCE_GRAD,0RESHARD\n"
    assert to_csv(from_csv(text)).split() == ["0F0,0F1,0B0,0B1"]
    text = (
        "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    )
    schedule = from_csv(text)
    assert "WAIT" not in to_csv(schedule)
    assert from_csv("0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n").actions == (
        (StageAction(0, Kind.FORWARD, 0), StageAction(0, Kind.FULL_BACKWARD, 0)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no actions"),
        (",,\n,\n", "has no actions"),
        ("0F0,x1\n", "expected an action such as 2F0.*got 'x1'"),
        ("0F\n", "expected an action"),
        ("0F0\n0B0\n", "stage 0 has actions on ranks 0 and 1"),
        ("0F0\n2F0\n", "actions of stage 2 and none of 1"),
    ],
)
def test_csv_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0F0,0B0", "action 1, 0F0: it is there twice"),
        ("0B0,0F0", "action 0, 0B0: it comes before its F"),
        ("0F0,0W0,0I0", "action 1, 0W0: it comes before its I"),
        ("0F0,0B0,0I0", "action 2, 0I0: the microbatch has B already"),
        ("0F0,0I0,0B0", "action 2, 0B0: the microbatch has I already"),
        ("0F0,0I0", "lacks 0W0"),
        ("0F0,0F1,0B1", "lacks 0I0, 0W0"),
        ("0F99999999", "lacks 0F0, .* and more"),
    ],
)
def test_incomplete_schedules(rows: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(from_csv(rows))


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (StageAction(3, Kind.FORWARD, 0), "there are 2 stages and 1 microbatches"),
        (StageAction(0, Kind.FORWARD, 1), "there are 2 stages and 1 microbatches"),
        (StageAction(1, Kind.FORWARD, 0), "stage 1 is on rank 1"),
    ],
)
def test_actions_that_do_not_belong(one: StageAction, message: str) -> None:
    schedule = Schedule(
        name="bad", num_microbatches=1, placement=(0, 1), actions=((one,), ())
    )
    with pytest.raises(ConfigError, match=message):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_microbatches": 0}, "microbatches to be an int >= 1"),
        ({"placement": ()}, "at least one stage"),
        ({"placement": loop_placement(2)}, "outside 0 to 0"),
    ],
)
def test_schedules_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    good = {"name": "x", "num_microbatches": 1, "placement": (0,), "actions": ((),)}
    with pytest.raises(ConfigError, match=message):
        Schedule(**{**good, **settings})
