"""SyncBatchNorm under policy sync: one process on the same batches."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

import elche
from elche.runtime.process.coordinator import serve_in_thread
from tests.comm.norm.cases.sync_batch_norm_cases import train_with_setup
from tests.distributed.cases.tasks import Task, difference, identical, plain
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=200, batch_size=10, dtype="float64", model="norm")
HINTS = {"policy": "sync", "speed_hints": (1.0, 0.25)}


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


def test_ranks_without_samples_count_nowhere(ranks3: RankPool) -> None:
    task = dataclasses.replace(TASK, samples=40, batch_size=2)
    shared = dataclasses.replace(task, options={"policy": "sync"})
    states = ranks3.run(train_with_setup, shared, case_setup=serve_in_thread)
    assert identical(states)
    assert difference(states[0], plain(task).state) <= 1e-11


@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_policies_in_which_ranks_do_not_meet_refuse(
    ranks2: RankPool, policy: str
) -> None:
    task = dataclasses.replace(TASK, options={"policy": policy})
    ended = ranks2.run(
        train_with_setup, task, case_setup=serve_in_thread, expect_failure=True
    )
    for outcome in ended:
        assert outcome.error is not None
        assert "1 is a SyncBatchNorm layer, in which all ranks" in outcome.error.text


def _by_hand_then_setup() -> list[float]:
    group = elche.init_group(timeout_s=60.0)
    replica = elche.Replica.wrap(torch.nn.Linear(2, 2))
    elche.barrier()
    elche.shutdown()
    with pytest.raises(elche.CommunicationError, match="has ended on rank"):
        replica.check_equal()
    state = train_with_setup(dataclasses.replace(TASK, samples=20, epochs=1))
    return [float(group.rank == int(os.environ["RANK"])), float(state["0.bias"].sum())]


def test_a_group_by_hand_then_a_run(ranks2: RankPool) -> None:
    first, second = ranks2.run(_by_hand_then_setup, case_setup=serve_in_thread)
    assert first == second
    assert first[0] == 1.0
