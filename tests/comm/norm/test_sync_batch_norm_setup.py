"""SyncBatchNorm under policy sync: one process on the same batches."""

from __future__ import annotations

import copy
import dataclasses
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.comm.norm.sync_batch_norm import convert_sync_batchnorm
from elche.session import setup
from tests.distributed.cases.tasks import Task, build, difference, identical, plain
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

TASK = Task(samples=200, batch_size=10, dtype="float64", model="norm")
HINTS = {"policy": "sync", "speed_hints": (1.0, 0.25)}


def train_with_setup(
    task: Task, convert_at: int | None = None
) -> dict[str, torch.Tensor]:
    """A task in which `elche.setup` divides the batches, on converted layers.

    They are before, or after so many batches.
    """
    model, optimizer, loader = build(task)
    if convert_at is None:
        convert_sync_batchnorm(model)
    options = {"policy": "sync", **task.options}
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    if convert_at == 0:
        convert_sync_batchnorm(model)
    for _ in range(task.epochs):
        for number, (x, y, *_) in enumerate(loader, 1):
            F.cross_entropy(model(x), y).backward()
            if convert_at == number:
                convert_sync_batchnorm(model)
            optimizer.step()
            optimizer.zero_grad()
    elche.shutdown()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "gloo"}, {"transport": "gloo", "bucket_cap_mb": 1e-5}],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_unequal_shares_equal_one_process(
    ranks2: RankPool, optimizer: str, options: dict[str, object]
) -> None:
    task = dataclasses.replace(TASK, optimizer=optimizer, options=HINTS | options)
    states = ranks2.run(
        train_with_setup, task, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical(states)
    # A bias before BatchNorm has no gradient but rounding, which AdamW scales up.
    bound = 1e-11 if optimizer == "sgd" else 1e-7
    assert difference(states[0], plain(task).state) <= bound


def test_layers_converted_after_setup_meet_from_the_next_epoch_on(
    ranks2: RankPool,
) -> None:
    task = dataclasses.replace(TASK, options=HINTS)
    states = ranks2.run(
        train_with_setup, task, 0, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical(states)
    assert difference(states[0], plain(task).state) <= 1e-11


@pytest.mark.parametrize(
    ("policy", "batches", "says"),
    [
        ("sync", 2, "or BatchNorm layers converted, inside an epoch"),
        ("cadence", 0, "1 is a SyncBatchNorm layer, which needs all"),
        ("async", None, "1 is a SyncBatchNorm layer, which needs all"),
        ("auto", None, "1 is a SyncBatchNorm layer, which needs all"),
    ],
)
def test_layers_converted_too_late_or_where_ranks_do_not_meet_are_refused(
    ranks2: RankPool, policy: str, batches: int | None, says: str
) -> None:
    task = dataclasses.replace(TASK, options={"policy": policy})
    ends = ranks2.run(
        train_with_setup, task, batches, case_setup=serve_in_thread, expect_failure=True
    )
    for end in ends:
        assert says in str(end.error)


def _said_at_setup(policy: str, prepare: str) -> list[str]:
    """What a rank writes to stderr at set-up of a model with a BatchNorm layer."""
    model, optimizer, loader = build(TASK)
    if prepare == "convert":
        elche.convert_sync_batchnorm(model)
    model.train(prepare != "freeze")
    lines: list[str] = []
    with mock.patch.object(setup, "write_line", lines.append):
        elche.setup(model, optimizer, loader, policy=policy)
        elche.shutdown()
    return lines


@pytest.mark.parametrize(
    ("policy", "prepare", "said"),
    [
        ("sync", "", 2),
        ("sync", "convert", 1),
        ("sync", "freeze", 1),
        ("cadence", "", 1),
    ],
)
def test_plain_layers_are_said_at_setup(
    ranks2: RankPool, policy: str, prepare: str, said: int
) -> None:
    first, second = ranks2.run(
        _said_at_setup, policy, prepare, case_setup=serve_in_thread
    )
    assert second == []
    assert len(first) == said
    if said == 2:
        assert first[1].startswith("elche: BatchNorm ('1') takes its statistics from")
        assert "elche.convert_sync_batchnorm(model)" in first[1]


def _by_hand_then_setup() -> list[float]:
    group = elche.init_group(timeout_s=60.0)
    replica = elche.Replica.wrap(torch.nn.Linear(2, 2))
    elche.barrier()
    elche.shutdown()
    with pytest.raises(elche.errors.CommunicationError, match="has ended on rank"):
        replica.check_equal()
    state = train_with_setup(dataclasses.replace(TASK, samples=20, epochs=1))
    return [float(group.rank == int(os.environ["RANK"])), float(state["0.bias"].sum())]


def test_a_group_by_hand_then_a_run(ranks2: RankPool) -> None:
    first, second = ranks2.run(_by_hand_then_setup, case_setup=serve_in_thread)
    assert first == second
    assert first[0] == 1.0
