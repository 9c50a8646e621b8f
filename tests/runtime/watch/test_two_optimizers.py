"""Averaged parameters that two optimizers step: both have their state as is asked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elche.runtime.process.coordinator import serve_in_thread
from tests.distributed.cases.tasks import Task
from tests.harness.rank_pool import RankPool
from tests.runtime.windows.cases.lost_cases import (
    train_through_bad_samples,
    train_with_a_late_optimizer,
)

pytestmark = pytest.mark.distributed

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def states(
    pool: RankPool, policy: str, optimizer_state: str
) -> list[dict[str, torch.Tensor]]:
    """What each rank's optimizers hold at an epoch's end, by number and name."""
    task = Task(samples=320, batch_size=8, epochs=1, shuffle=False)
    settings = {"policy": policy, "optimizer_state": optimizer_state, "anchor": 4}
    task = dataclasses.replace(task, options=settings)
    ranks = pool.run(
        train_through_bad_samples,
        task,
        (),
        "two optimizers",
        case_setup=serve_in_thread,
    )
    assert not any(rank.ended[0] for rank in ranks)
    return [
        {name: value for name, value in rank.values.items() if name[:2] in ("0 ", "1 ")}
        for rank in ranks
    ]


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_both_are_reset(ranks2: RankPool, policy: str) -> None:
    assert states(ranks2, policy, "reset") == [{}, {}]


def test_both_are_averaged(ranks2: RankPool) -> None:
    one, other = states(ranks2, "cadence", "average")
    moments = [name for name in one if name.endswith(MOMENTS)]
    assert {name[0] for name in moments} == {"0", "1"}
    for name in moments:
        assert torch.equal(one[name], other[name]), name


def test_state_that_one_rank_has_not_yet_is_said_once(ranks2: RankPool) -> None:
    """It is averaged from the window on in which both have it."""
    options = {"policy": "cadence", "deterministic": True, "anchor": 2}
    options["optimizer_state"] = "average"
    task = Task(samples=320, batch_size=8, epochs=1, options=options)
    (said, state), (said_late, late) = ranks2.run(
        train_with_a_late_optimizer, task, 6, case_setup=serve_in_thread
    )
    here = "no optimizer state is averaged while ranks [1] hold other state"
    sgd, adamw = (f"{each} holds state for 2 of 2" for each in ("SGD", "AdamW"))
    assert [(here in line, sgd in line, adamw in line) for line in said] == [
        (True,) * 3
    ]
    assert [(line[:6], here in line, sgd in line) for line in said_late] == [
        ("rank 1", True, True)
    ]
    assert "AdamW" not in said_late[0]
    moments = [name for name in state if name.endswith(MOMENTS)]
    assert moments
    for name in moments:
        assert torch.equal(state[name], late[name]), name


def test_both_stay_local(ranks2: RankPool) -> None:
    one, other = states(ranks2, "async", "local")
    for number in ("0", "1"):
        names = [n for n in one if n.startswith(number) and n.endswith(MOMENTS)]
        assert names
        assert not any(torch.equal(one[name], other[name]) for name in names)
