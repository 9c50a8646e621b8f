"""Under windows an update that is not finite is discarded, and its rank goes on."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import elche
from elche.errors import NonFiniteError
from tests.distributed.cases.tasks import (
    Task,
    begin,
    identical,
    state_of,
    take_step,
)
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.windows.cases.lost_cases import Survived, train_through_bad_samples

pytestmark = pytest.mark.distributed

BATCH, SAMPLES = 8, 640
WAYS = [("cadence", "parameters"), ("cadence", "gradients"), ("async", "parameters")]


def task_of(**options: Any) -> Task:
    task = Task(samples=SAMPLES, batch_size=BATCH, epochs=1, shuffle=False)
    usual = {"anchor": 4, "max_anchor": 4, "local_batch_size": BATCH}
    return dataclasses.replace(task, options={**usual, **options})


def run(
    pool: RankPool, bad: set[int], loop: str, accumulated: int = 1, **options: Any
) -> list[Survived]:
    """An epoch of 80 batches, of which these hold a sample that gives no number."""
    samples = tuple(BATCH * batch + 3 for batch in sorted(bad))
    return pool.run(
        train_through_bad_samples,
        task_of(**options),
        samples,
        loop,
        accumulated,
        case_setup=serve_in_thread,
    )


def discarded(ranks: list[Survived]) -> list[int]:
    """Batches that ranks said to be discarded; every one was trained on once."""
    seen = sorted(index for rank in ranks for index in rank.order)
    assert seen == list(range(SAMPLES))
    gone: list[int] = []
    for rank in ranks:
        own = [batch for line in rank.discarded for batch in batches_in(line)]
        assert set(own) <= {index // BATCH for index in rank.order}
        gone += own
    metrics = ranks[0].metrics
    assert metrics is not None
    assert sum(metrics.discarded_samples) == BATCH * len(gone)
    assert metrics.samples == SAMPLES - BATCH * len(gone)
    assert metrics.samples == ranks[0].progress == ranks[1].progress
    for rank, trained in enumerate(ranks):
        used = metrics.rank_samples[rank] + metrics.discarded_samples[rank]
        assert used == len(trained.order)
    return sorted(gone)


def batches_in(line: str) -> list[int]:
    """Those that a rank says it has discarded."""
    named = re.search(r"from batches ([\d, to]+) contains NaN or Inf", line)
    assert named is not None, line
    found: list[int] = []
    for part in named[1].split(", "):
        first, *last = (int(number) for number in part.split(" to "))
        found += range(first, last[0] + 1 if last else first + 1)
    return found


def is_finite(ranks: list[Survived]) -> bool:
    return all(bool(v.isfinite().all()) for rank in ranks for v in rank.values.values())


def models(ranks: list[Survived]) -> list[dict[str, torch.Tensor]]:
    return [{k: v for k, v in r.values.items() if " " not in k} for r in ranks]


@pytest.mark.parametrize("non_finite", ["stop", "leave_out"])
@pytest.mark.parametrize(("policy", "update"), WAYS)
def test_one_window_is_lost_with_a_batch_that_gives_no_number(
    ranks2: RankPool, policy: str, update: str, non_finite: str
) -> None:
    """Windows of four batches of each rank, whatever the machine does beside."""
    options = {"policy": policy, "update": update, "non_finite": non_finite}
    ranks = run(ranks2, {17}, "plain", deterministic=True, **options)
    assert [rank.ended for rank in ranks] == [("", None, ())] * 2
    assert discarded(ranks) == [16, 17, 18, 19]
    assert is_finite(ranks)
    assert identical(models(ranks))
    assert not ranks[1].discarded
    (said,) = ranks[0].discarded
    assert said.startswith("rank 0: the update of epoch 0 from batches 16 to 19 ")
    assert said.endswith(f"samples {list(range(16 * BATCH, 20 * BATCH))}")


@pytest.mark.parametrize(("policy", "update"), WAYS)
def test_a_rank_that_brings_nothing_finite_ends_the_run_and_is_named(
    ranks2: RankPool, policy: str, update: str
) -> None:
    ranks = run(ranks2, set(), "rank 1 is broken", policy=policy, update=update)
    for each in ranks:
        said, rank, batches = each.ended
        assert rank == 1
        assert "the update of rank 1 was not finite twice in a row" in said
        named = {batch for part in batches for batch in range(*part)}
        own = {index // BATCH for index in ranks[1].order}
        assert named
        assert named <= own
        assert f"samples [{BATCH * min(named)}, " in said
    assert not ranks[0].discarded


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_gradients_that_wait_go_with_the_update_that_is_discarded(
    ranks2: RankPool, policy: str
) -> None:
    """Two batches a step in windows of three: the third is of parameters that are NaN.

    What it leaves in ``p.grad`` would spoil the next step, and end the run.
    """
    options = {"policy": policy, "anchor": 3, "max_anchor": 3}
    ranks = run(ranks2, {1}, "plain", 2, deterministic=True, **options)
    assert [rank.ended for rank in ranks] == [("", None, ())] * 2
    assert discarded(ranks) == [0, 1, 2]
    assert is_finite(ranks)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_scaler_that_has_not_stepped_yet_skips_the_first_step(
    ranks2: RankPool, policy: str
) -> None:
    """Eight batches a step in windows of two: gradients wait before any step came."""
    options = {"policy": policy, "anchor": 2, "max_anchor": 2}
    ranks = run(ranks2, {0, 1, 2, 3}, "scaler", 8, **options)
    assert [rank.ended for rank in ranks] == [("", None, ())] * 2
    assert is_finite(ranks)
    assert not discarded(ranks)
    metrics = ranks[0].metrics
    assert metrics is not None
    assert metrics.scalars["grad_scaler_skips"] > 0


@pytest.mark.parametrize("non_finite", ["stop", "leave_out"])
@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("overflows", {"policy": "cadence", "update": "gradients"}),
        ("leaps", {"policy": "cadence", "outer": "slowmo", "outer_lr": 1e38}),
        ("leaps", {"policy": "async", "outer": "slowmo", "outer_lr": 1e38}),
    ],
)
def test_common_parameters_that_are_lost_end_every_run(
    ranks2: RankPool, loop: str, options: dict[str, Any], non_finite: str
) -> None:
    """Else all that follows is discarded, to an end that looks like any other."""
    ranks = run(ranks2, set(), loop, non_finite=non_finite, **options)
    for each in ranks:
        said, rank, batches = each.ended
        assert rank in (0, 1)
        assert f"rank {rank} holds non-finite parameters after window" in said
        assert batches


def train_on_a_lost_model(task: Task) -> str:
    """The model is lost before an epoch; its batches are not at fault."""
    model, _, loader = begin(task, **task.options)
    for _ in loader:
        pass
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(
        NonFiniteError, match=r"parameters contain NaN at the start of epoch 1"
    ) as no:
        next(iter(loader))
    elche.shutdown()
    return str(no.value)


@pytest.mark.parametrize(
    ("policy", "update"), [("cadence", "gradients"), ("async", "parameters")]
)
def test_no_batch_is_blamed_for_a_model_that_was_lost_before(
    ranks2: RankPool, policy: str, update: str
) -> None:
    task = task_of(policy=policy, update=update, non_finite="leave_out")
    ends = ranks2.run(train_on_a_lost_model, task, case_setup=serve_in_thread)
    assert all("samples" not in said for said in ends)


def train_on_bad_beginning(task: Task) -> tuple[dict[str, torch.Tensor], int]:
    """An epoch whose first two batches are no numbers, BatchNorm in the way of them.

    Returns:
        The model, and how many batches were discarded.
    """
    model, optimizer, loader = begin(task, **task.options)
    for x, y, index, _ in loader:
        x[index < 2 * task.batch_size] = float("nan")
        take_step(model, optimizer, x, y)
    state = state_of(model)
    gone = sum(elche.epoch_metrics().discarded_samples) // task.batch_size
    elche.shutdown()
    return state, gone


@pytest.mark.parametrize("update", ["parameters", "gradients"])
def test_statistics_outlive_a_window_that_is_discarded_whole(
    ranks2: RankPool, update: str
) -> None:
    task = Task(samples=160, batch_size=8, model="norm", shuffle=False)
    options = {"policy": "cadence", "update": update, "deterministic": True}
    options |= {"non_finite": "leave_out", "local_batch_size": task.batch_size}
    task = dataclasses.replace(task, options=options)
    ranks = ranks2.serve(train_on_bad_beginning, task)
    states, gone = [state for state, _ in ranks], ranks[0][1]
    assert identical(states)
    assert all(torch.isfinite(value).all() for value in states[0].values())
    assert 2 <= gone < 20
    assert int(states[0]["1.num_batches_tracked"]) == 20 - gone
