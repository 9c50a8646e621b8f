"""Losses of ranks: which end a run and why, and what follows from each cause. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from elche.config import RunConfig
from elche.config_parts import DebugConfig, TransportConfig
from elche.coordination.agreement import Settings
from elche.coordination.fatal_losses import (
    LossLimits,
    RunFacts,
    fatal_loss,
    fatal_setting,
)
from elche.coordination.membership import TRANSITIONS, RankState, cause_of, next_state
from elche.coordination.protocol.events import Failed, Left, RankLost, ReplicasFormed
from elche.coordination.protocol.instructions import Abort, Regroup
from elche.coordination.state import Coordinator
from elche.errors import TransitionError


def facts_of(config: RunConfig | None = None, **settings: Any) -> RunFacts:
    """Three ranks inside an epoch of a run that survives."""
    return RunFacts(
        has_launcher=True,
        settings=Settings(config=config or RunConfig(), **settings),
        ranks=frozenset({0, 1, 2}),
        epoch=0,
    )


@pytest.mark.parametrize(
    ("config", "settings", "ends"),
    [
        ({"policy": "sync", "codec": "int8"}, {}, "codec='int8' under policy 'sync'"),
        ({"policy": "cadence", "codec": "int8"}, {}, ""),
        ({"transport": TransportConfig(kind="nccl")}, {}, "transport.kind='nccl'"),
        ({"debug": DebugConfig(deterministic=True)}, {}, "a deterministic run"),
        ({"survive": False}, {}, "survive=False"),
        ({}, {"is_stream": True}, "a stream"),
        (
            {"policy": "auto"},
            {"syncs_batchnorm": True},
            "SyncBatchNorm under policy='auto'",
        ),
        ({"policy": "async"}, {"syncs_batchnorm": True}, ""),
        ({"policy": "sync"}, {"backend": "NCCL"}, "policy='sync' over NCCL"),
        ({"policy": "auto"}, {"backend": "XCCL"}, "policy='auto' over XCCL"),
        ({"policy": "cadence"}, {"backend": "NCCL"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_setting_that_ends_the_run_is_named(
    config: dict[str, Any], settings: dict[str, Any], ends: str
) -> None:
    backend = settings.pop("backend", "")
    facts = replace(facts_of(RunConfig(**config), **settings), backend=backend)
    assert fatal_setting(facts) == ends
    assert fatal_loss(1, facts) == (f"the death of a rank ends {ends}" if ends else "")


def test_a_run_without_a_launcher_or_with_a_default_group_ends() -> None:
    facts = RunFacts(has_launcher=False)
    assert "without a launcher" in fatal_setting(facts)
    facts = replace(facts_of(), has_default_group=True)
    assert "torch.distributed's own process group" in fatal_setting(facts)
    assert fatal_setting(RunFacts(has_launcher=True)) == ""


@pytest.mark.parametrize(
    ("change", "fatal", "why"),
    [
        ({}, (), ""),
        ({"epoch": -1}, (0, 1, 2), "before the first epoch has begun"),
        ({"has_left": True}, (0, 1, 2), "no new group can form"),
        ({"ranks": frozenset({1})}, (0, 1, 2), "no new group can form"),
        ({"limits": LossLimits(has_breaks=True)}, (0, 1, 2), "no new group can form"),
        ({"limits": LossLimits(sole_holders={1})}, (1,), "rank 1 trains alone"),
        (
            {"limits": LossLimits(changing=(2,))},
            (0, 1, 2),
            r"ranks [2] are being excluded from steps, or readmitted",
        ),
    ],
)
def test_the_state_of_a_run_decides(
    change: dict[str, Any], fatal: tuple[int, ...], why: str
) -> None:
    facts = replace(facts_of(), **change)
    for rank in range(3):
        text = fatal_loss(rank, facts)
        assert bool(text) == (rank in fatal), rank
        assert why in text or rank not in fatal


def test_the_first_rank_alone_has_the_scripts_own_sampler() -> None:
    facts = replace(facts_of(own_sampler="Evens"), ranks=frozenset({1, 2}))
    assert fatal_loss(1, facts).startswith(
        "rank 1 drew the samples' order from the script's own Evens"
    )
    assert fatal_loss(2, facts) == ""


def test_each_cause_is_known_by_its_event() -> None:
    events = (
        Left(rank=0),
        Failed(rank=0, error="", traceback=""),
        RankLost(rank=0),
        RankLost(rank=0, silent_s=10.0),
    )
    causes = [cause_of(event) for event in events]
    assert causes == ["left", "failed", "disconnected", "silent"]
    alive = [RankState.WAITING, RankState.NEW, RankState.MEMBER, RankState.LEFT]
    impossible = {*itertools.product(alive, causes)} - TRANSITIONS.keys()
    assert impossible == {(RankState.LEFT, "left")}


def test_an_impossible_transition_prints_the_table() -> None:
    with pytest.raises(TransitionError, match="got left and left") as raised:
        next_state(RankState.LEFT, "left", survives=True)
    assert "member   disconnected  lost          ended" in str(raised.value)


def test_a_lost_rank_takes_its_replica_with_it_until_one_is_left() -> None:
    core = Coordinator(6, survives=True)
    for rank in range(6):
        core.handle(ReplicasFormed(rank=rank, replicas=((0, 1), (2, 3), (4, 5))), 0.0)
    assert core.survives(3)
    first = core.handle(RankLost(rank=3), 1.0)
    assert [(one.rank, one.left) for one in first if isinstance(one, Regroup)] == [
        (rank, (2, 3)) for rank in (0, 1, 4, 5)
    ]
    assert core.lost == {2, 3}
    assert core.handle(RankLost(rank=2), 1.5) == [], "it was fenced"
    late = ReplicasFormed(rank=5, replicas=((0, 1), (2, 3), (4, 5)))
    core.handle(late, 1.5)
    second = core.handle(RankLost(rank=0, silent_s=10.0), 2.0)
    assert [one.rank for one in second if isinstance(one, Regroup)] == [4, 5]
    assert core.silent == {0, 1}
    assert not core.survives(4)
    last = core.handle(RankLost(rank=4), 3.0)
    assert [type(one) for one in last] == [Abort, Abort]


@pytest.mark.parametrize("survives", [False, True])
def test_replicas_that_cannot_lose_one(survives: bool) -> None:
    core = Coordinator(2, survives=survives)
    core.handle(ReplicasFormed(rank=0, replicas=((0,), (1,))), 0.0)
    assert core.survives(1) == survives
    core.handle(Left(rank=0), 1.0)
    assert not core.survives(1), "the others have left"
    core.handle(Left(rank=1), 1.0)
    for rank in range(2):
        core.handle(ReplicasFormed(rank=rank, replicas=((0,), (1,))), 2.0)
    assert core.survives(1) == survives, "of the next pipeline"


def test_a_second_pipeline_in_one_process_leaves_and_dies_like_the_first() -> None:
    core = Coordinator(2)
    events = [Left(rank=0), ReplicasFormed(rank=0, replicas=()), Left(rank=0)]
    for event in events:  # before rank 1 has left the first one
        assert core.handle(event, 0.0) == []
    core = Coordinator(2)
    for rank in range(2):
        core.handle(Left(rank=rank), 0.0)
        core.handle(ReplicasFormed(rank=rank, replicas=()), 1.0)
    answers = core.handle(RankLost(rank=1), 2.0)
    assert [type(one) for one in answers] == [Abort, Abort]
