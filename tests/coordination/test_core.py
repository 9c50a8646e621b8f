"""Joins, claims and messages out of turn, event by event."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.coordination.gathering import WELL_AFTER_S
from elche.coordination.protocol.events import (
    BarrierReached,
    BatchesDone,
    EpochLeft,
    EpochOpened,
    Event,
    Failed,
    Join,
    Left,
    ModelUpdated,
    PassBegun,
    StepsDone,
    Tick,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    Abort,
    Adopt,
    BeginEpoch,
    CloseWindow,
    EndEpoch,
    GrantBatches,
    Instruction,
    JoinPasses,
    MetricsReported,
    OpenWindow,
    RankLeft,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.state import Coordinator
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.rank import join_of as simulated_join
from tests.harness.model_checks import checks_of
from tests.harness.settings import nested


def plan_of(policy: str, world_size: int = 2, **options: Any) -> Cluster:
    device = Device(seconds_per_sample=0.01, count=world_size, prefetch=0)
    if policy != "sync":
        options = {"local_batch_size": 8, **options}
    run = SimulatedRun(policy=policy, options=nested(options), batch_sizes=((8, 20),))
    return Cluster(run=run, devices=(device,))


def with_run(plan: Cluster, **changes: Any) -> Cluster:
    return replace(plan, run=replace(plan.run, **changes))


def join_of(plan: Cluster, rank: int, **changes: Any) -> Join:
    weight = (("weight", "[3, 4]", "float32"),)
    device = plan.devices[0]
    return simulated_join(plan, rank, device, **({"tensors": weight} | changes))


def joined(plan: Cluster) -> Coordinator:
    core = Coordinator(plan.world_size)
    for rank in range(plan.world_size):
        core.handle(join_of(plan, rank), 0.0)
    core.check()
    return core


def opened(plan: Cluster) -> tuple[Coordinator, list[Instruction]]:
    core = joined(plan)
    told: list[Instruction] = []
    for rank in reversed(range(plan.world_size)):
        sizes = plan.run.sizes if rank == 0 else None
        told += core.handle(EpochOpened(rank=rank, epoch=0, sizes=sizes), 0.0)
    core.check()
    return core, told


def reason_of(told: list[Instruction], world_size: int) -> str:
    """The reason of an abort that goes to every rank."""
    assert [type(message) for message in told] == [Abort] * world_size
    assert [message.rank for message in told] == list(range(world_size))
    (reason,) = {message.reason for message in told if isinstance(message, Abort)}
    return reason


def batch_done(rank: int, batch: int, **changes: Any) -> BatchesDone:
    done = BatchesDone(
        rank=rank,
        epoch=0,
        window=0,
        start=batch,
        stop=batch + 1,
        samples=8,
        busy_s=0.1,
        data_wait_s=0.0,
        timed=1,
        timed_s=0.1,
    )
    return replace(done, **changes)


def steps_done(rank: int, start: int, stop: int, **changes: Any) -> StepsDone:
    done = StepsDone(
        rank=rank,
        epoch=0,
        start=start,
        stop=stop,
        samples=4 * (stop - start),
        busy_s=0.1,
        data_wait_s=0.0,
        sync_wait_s=0.0,
        warm=True,
        backward_passes=stop,
    )
    return replace(done, **changes)


def closed(rank: int, window: int) -> WindowClosed:
    return WindowClosed(rank=rank, epoch=0, window=window, changed_buffers=())


def reduced(rank: int, window: int) -> ModelUpdated:
    return ModelUpdated(rank=rank, epoch=0, window=window, sync_s=0.1)


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({}, {"tensors": ()}, "the model differs between ranks: weight: rank 0 has"),
        ({}, {"version": PROTOCOL_VERSION + 1}, "rank 1 uses protocol version"),
        ({}, {"world_size": 5}, "rank 1 has world size 5, expected the coordinator's,"),
        ({"speed_hints": (1.0, 0.5, 0.5)}, {}, "expected a speed hint per rank (2)"),
    ],
)
def test_ranks_that_differ_are_refused_by_name(
    options: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    plan, core = plan_of("sync", **options), Coordinator(2)
    core.handle(join_of(plan, 0), 0.0)
    reason = reason_of(core.handle(join_of(plan, 1, **change), 0.0), 2)
    assert said in reason
    # Once hints came as a protocol error with a story, not as a wrong setting.
    assert "story" not in reason
    core.check()


def test_a_second_join_of_a_rank_is_refused() -> None:
    core = Coordinator(2)
    core.handle(join_of(plan_of("sync"), 0), 0.0)
    told = core.handle(join_of(plan_of("sync"), 0), 0.0)
    assert "rank 0 cannot join again" in reason_of(told, 2)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_after_all_have_left_the_same_ranks_may_begin_another_run(policy: str) -> None:
    plan = plan_of(policy)
    core = joined(plan)
    for rank in range(2):
        assert core.handle(Left(rank=rank), 1.0) == []
    assert core.is_finished
    assert core.handle(join_of(plan, 1), 2.0) == []
    told = core.handle(join_of(plan, 0), 2.0)
    assert [type(message) for message in told] == [Welcome] * 2
    assert {m.generation for m in told if isinstance(m, Welcome)} == {1}
    for rank in range(2):
        sizes = plan.run.sizes if rank == 0 else None
        told = core.handle(EpochOpened(rank=rank, epoch=0, sizes=sizes), 3.0)
    assert [m.rank for m in told if isinstance(m, BeginEpoch)] == [0, 1]


def test_a_rank_may_join_the_next_run_before_another_has_left_this_one() -> None:
    """Once: "cannot join (again)": two `elche.setup` in one script race.

    `elche.setup` sends Left and then Join; nothing makes it wait for other ranks.
    """
    plan = plan_of("sync")
    core = joined(plan)
    core.handle(Left(rank=0), 1.0)
    told = core.handle(join_of(plan, 0), 1.0)
    told += core.handle(Left(rank=1), 1.1)
    told += core.handle(join_of(plan, 1), 1.1)
    assert [type(message) for message in told] == [Welcome] * 2


@pytest.mark.parametrize("batch", [3, 39, 40, -1, 10**9])
def test_a_claim_of_batches_never_leased_ends_the_run_with_its_story(
    batch: int,
) -> None:
    core, _ = opened(plan_of("cadence"))
    reason = reason_of(core.handle(batch_done(1, batch), 1.0), 2)
    assert f"1 claims batches {batch}..{batch}" in reason
    assert "story:" in reason
    assert "GrantBatches(rank=1" in reason
    core.check()


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 2), (5, 6), (-1, 0)])
def test_a_claim_of_steps_never_granted_ends_the_run(start: int, stop: int) -> None:
    core, told = opened(plan_of("sync"))
    assert any(isinstance(m, GrantBatches) for m in told)
    reason = reason_of(core.handle(steps_done(1, start, stop), 1.0), 2)
    assert f"rank 1 reports steps {start}..{stop - 1}" in reason
    assert "story:" in reason


OUT_OF_TURN: list[Event] = [
    closed(0, 5),
    reduced(0, 0),
    EpochLeft(rank=0, epoch=3, step=0),
    batch_done(0, 0, epoch=1),
    steps_done(0, 0, 1, epoch=4),
    EpochOpened(rank=0, epoch=0),
]


@pytest.mark.parametrize(
    ("policy", "event"),
    [
        *itertools.product(("cadence", "sync"), OUT_OF_TURN),
        ("cadence", steps_done(0, 0, 1)),
        ("sync", batch_done(0, 0)),
        ("sync", closed(0, 0)),
    ],
)
def test_a_message_out_of_turn_ends_the_run_with_its_story(
    policy: str, event: Event
) -> None:
    core, _ = opened(plan_of(policy))
    reason = reason_of(core.handle(event, 1.0), 2)
    assert "story:" in reason
    assert type(event).__name__ in reason


@pytest.mark.parametrize(
    "event",
    [
        EpochOpened(rank=0, epoch=0, sizes=((8, 2),)),
        batch_done(0, 0),
        steps_done(0, 0, 1),
        closed(0, 0),
        EpochLeft(rank=0, epoch=0, step=0),
    ],
)
def test_nothing_may_be_said_before_all_have_joined(event: Event) -> None:
    core = Coordinator(2)
    core.handle(join_of(plan_of("sync"), 0), 0.0)
    assert "before all ranks have joined" in reason_of(core.handle(event, 1.0), 2)


@pytest.mark.parametrize(
    ("policy", "event"),
    [
        ("cadence", batch_done(7, 0)),
        ("cadence", closed(7, 0)),
        ("cadence", EpochLeft(rank=7, epoch=0, step=0)),
        ("sync", steps_done(7, 0, 1)),
    ],
)
def test_a_rank_that_does_not_exist_is_passed_over(policy: str, event: Event) -> None:
    """Once: IndexError or KeyError leaves `handle`."""
    core, _ = opened(plan_of(policy))
    assert core.handle(event, 1.0) == []
    assert core.aborted is None
    assert "no such rank" in core.story()[-1]


@pytest.mark.parametrize(
    ("policy", "change"),
    [
        *(("cadence", {"samples": n}) for n in (-8, 0, 7, 10**9)),
        *(("sync", {"samples": n}) for n in (-4, 0, 3, 8, 10**9)),
        *(("cadence", {"busy_s": s}) for s in (math.nan, math.inf, -1.0)),
        *(("sync", {"busy_s": s}) for s in (math.nan, math.inf, -1.0)),
    ],
)
def test_samples_and_times_that_cannot_be_end_the_run(
    policy: str, change: dict[str, Any]
) -> None:
    """Once they were taken on trust; -8 and 0 raised ValueError, ZeroDivisionError."""
    core, told = opened(plan_of(policy))
    if policy == "sync":
        assert GrantBatches(rank=0, epoch=0, start=0, stop=1, shares=(4, 4)) in told
        told = core.handle(steps_done(0, 0, 1, **change), 1.0)
        told += core.handle(steps_done(1, 0, 1), 1.0)
    else:
        first = next(m for m in told if isinstance(m, GrantBatches) and m.rank == 0)
        told = core.handle(batch_done(0, first.start, **change), 1.0)
        told += core.handle(closed(0, 0), 1.0)
        told += core.handle(closed(1, 0), 1.0)
    assert Abort in {type(message) for message in told}


def test_settings_that_cannot_be_read_end_the_run() -> None:
    """Once: TypeError or JSONDecodeError leaves `handle`."""
    for settings in ((("config.surprise", "1"),), (("config.policy", "{"),)):
        core = Coordinator(1)
        told = core.handle(join_of(plan_of("sync", 1), 0, settings=settings), 0.0)
        assert Abort in {type(message) for message in told}


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_an_epoch_without_batches_ends_at_once_or_is_refused(policy: str) -> None:
    """Once: sync grants nothing and never ends; only the deadline does."""
    core, told = opened(with_run(plan_of(policy), batch_sizes=()))
    for window in [m.window for m in told if isinstance(m, OpenWindow)][:1]:
        for rank in (0, 1):
            told += core.handle(closed(rank, window), 1.0)
    assert {EndEpoch, Abort} & {type(message) for message in told}


def test_a_barrier_that_a_rank_cannot_reach_any_more_ends_the_run() -> None:
    """Once: who has left is looked at when epochs are opened, not at barriers."""
    core = joined(plan_of("sync"))
    core.handle(Left(rank=0), 1.0)
    assert "left" in reason_of(core.handle(BarrierReached(rank=1, name="a"), 2.0), 2)


def test_the_draining_close_goes_to_all_ranks_and_gives_their_leases_back() -> None:
    core, first = opened(plan_of("cadence", 3))
    told = core.handle(EpochLeft(rank=1, epoch=0, step=0), 1.0)
    closes = [m for m in told if isinstance(m, CloseWindow)]
    assert [(m.rank, m.drain) for m in closes] == [(0, True), (1, True), (2, True)]
    for rank in range(3):
        told = core.handle(closed(rank, 0), 2.0)
        core.check()
    assert [m.rank for m in told if isinstance(m, EndEpoch)] == [1]
    (said,) = [line for line in core.story() if "left the loop" in line]
    leased = sum(m.stop - m.start for m in first if isinstance(m, GrantBatches))
    mine = sum(
        m.stop - m.start for m in first if isinstance(m, GrantBatches) and m.rank == 1
    )
    assert mine > 0
    assert (
        f"left the loop of epoch 0 early: the epoch ends on all ranks; {mine}" in said
    )
    assert f"and {20 - leased + mine} unleased batches are not trained" in said


@pytest.mark.parametrize(
    ("samples", "busy_s"), [(8, 0.1), (0, 0.1), (4, math.nan), (4, math.inf)]
)
def test_a_claim_of_a_broken_step_is_checked(samples: int, busy_s: float) -> None:
    core, _ = opened(plan_of("sync"))
    left = EpochLeft(rank=0, epoch=0, step=1, samples=samples, busy_s=busy_s)
    assert "was granted 4" in reason_of(core.handle(left, 1.0), 2)


def test_a_broken_epoch_of_sync_is_told_when_all_have_left_it() -> None:
    core, _ = opened(plan_of("sync"))
    core.handle(steps_done(0, 0, 1), 1.0)
    core.handle(steps_done(1, 0, 1), 1.0)
    for rank in range(2):
        left = EpochLeft(rank=rank, epoch=0, step=2, samples=4, busy_s=0.5)
        told = core.handle(left, 2.0)
        core.check()
        assert len(told) == (1, 5)[rank]
    of_window, *of_epoch = told[:3]
    assert [type(message) for message in told[3:]] == [EndEpoch] * 2
    assert isinstance(of_window, MetricsReported)
    window = WindowMetrics.from_json(of_window.values)
    assert (window.window, window.synchronisations) == (1, 1)
    for message in of_epoch:
        assert isinstance(message, MetricsReported)
        metrics = EpochMetrics.from_json(message.values)
        assert (metrics.rank_samples, metrics.synchronisations) == ((8, 8), 2)
        assert metrics.busy_s == (0.6, 0.6)


@pytest.mark.parametrize("first_stepped", [0, 1])
def test_ranks_that_left_one_step_with_other_models(first_stepped: int) -> None:
    """All take one over, where one broke off before its optimizer's step; or parted."""
    core, _ = opened(plan_of("sync"))
    for rank, stepped in enumerate((first_stepped, 1)):
        row = (0, "weight", "CPU", rank, 1, 0.0, 1.0, 1.0)
        at = {"step": 1, "samples": 4, "stepped": stepped}
        told = core.handle(EpochLeft(rank=rank, epoch=0, checks=(row,), **at), 2.0)
    if first_stepped:
        said = "ranks [1] and [0] hold different values in weight where all have left"
        assert said in reason_of(told, 2)
        return
    assert [type(message) for message in told] == [Adopt] * 2
    assert {message.source for message in told if isinstance(message, Adopt)} == {0}


def test_a_rank_that_left_joins_what_all_others_have_begun() -> None:
    core, _ = opened(plan_of("sync", 3))
    told = core.handle(EpochLeft(rank=1, epoch=0, step=0, passes=7), 1.0)
    gone = [RankLeft(rank=r, epoch=0, gone=1, passes=7) for r in (0, 2)]
    assert told == gone
    begun = PassBegun(rank=0, epoch=0, step=1, passes=8, gone=1)
    assert core.handle(begun, 2.0) == []
    assert core.handle(replace(begun, rank=2, passes=7), 2.0) == [
        JoinPasses(rank=1, epoch=0, step=1, passes=8)
    ]
    # What rank 0 said before it knew of the second one says nothing about that.
    told = core.handle(EpochLeft(rank=2, epoch=0, step=0, passes=7), 3.0)
    assert told == [RankLeft(rank=0, epoch=0, gone=2, passes=7)]
    assert core.handle(begun, 3.0) == []
    told = core.handle(replace(begun, gone=2), 3.0)
    assert [m.rank for m in told if isinstance(m, JoinPasses)] == [1, 2]


def test_who_cannot_join_the_others_must_leave_with_them() -> None:
    core, _ = opened(plan_of("sync"))
    left = EpochLeft(rank=1, epoch=0, step=0, passes=7, apart="a layer needs it")
    core.handle(left, 1.0)
    told = core.handle(PassBegun(rank=0, epoch=0, step=1, passes=7, gone=1), 2.0)
    assert "rank 1 left epoch 0 after step 0, and rank 0 did not; a layer needs it" in (
        reason_of(told, 2)
    )


def drained() -> Coordinator:
    """A core whose rank 1 has left the epoch, which is over for it alone."""
    core, _ = opened(plan_of("cadence", 3))
    core.handle(EpochLeft(rank=1, epoch=0, step=0), 1.0)
    for rank in range(3):
        core.handle(closed(rank, 0), 2.0)
    return core


@pytest.mark.parametrize("event", [EpochOpened(rank=1, epoch=1), Tick()])
def test_a_break_ends_the_epoch_for_others_once_it_is_known_to_be_one(
    event: Event,
) -> None:
    core = drained()
    assert core.handle(Tick(), 2.0 + WELL_AFTER_S / 2) == []
    told = core.handle(event, 2.0 + WELL_AFTER_S)
    assert [m.rank for m in told if isinstance(m, EndEpoch)] == [0, 2]


def test_an_exception_that_looked_like_a_break_ends_the_run() -> None:
    """Once: the others' epoch ended as if all were well."""
    told = drained().handle(Failed(rank=1, error="a fault", traceback=""), 3.0)
    assert "rank 1 failed: a fault" in reason_of(told, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "x changed"}, "rank 1 does not train what rank 0 trains"),
        ({"checks": checks_of(1)}, "ranks [1] and [0] hold different values in w"),
    ],
)
def test_ranks_that_differ_at_the_beginning_of_an_epoch(
    change: dict[str, Any], says: str
) -> None:
    core = joined(plan_of("sync"))
    same = {"checks": checks_of(0)}
    core.handle(EpochOpened(rank=0, epoch=0, sizes=((8, 2),), **same), 1.0)
    told = core.handle(EpochOpened(rank=1, epoch=0, **{**same, **change}), 1.0)
    assert says in reason_of(told, 2)


def test_after_an_abort_every_newcomer_is_told() -> None:
    core = joined(plan_of("sync", 3))
    core.handle(EpochOpened(rank=1, epoch=4), 1.0)
    for event in (
        join_of(plan_of("sync", 3), 2),
        EpochOpened(rank=2, epoch=0),
        BarrierReached(rank=2, name="a"),
    ):
        (told,) = core.handle(event, 2.0)
        assert isinstance(told, Abort)
        assert told.rank == 2
        assert "opens epoch 4, expected 0" in told.reason
    assert core.handle(Tick(), 1e9) == []
