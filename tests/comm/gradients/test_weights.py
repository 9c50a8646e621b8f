"""Batches weigh what the user says: one process on the union batch, at any shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.comm.gradients.cases.weight_cases import (
    Ended,
    Job,
    alone,
    on_ranks,
    weigh_by,
)
from tests.distributed.cases.tasks import difference, identical
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed
NEW_RANKS = True

EXACT = 1e-13
SYNC = Job(samples=16 * 12 + 5, options={"policy": "sync", "speed_hints": (1.0, 0.25)})


def check(pool: RankPool, job: Job, reference: Ended, **pool_options: Any) -> None:
    """Ranks hold what one process does, counted samples, and logged by tokens."""
    ends = pool.run(on_ranks, job, case_setup=serve_in_thread, **pool_options)
    assert identical([end.state for end in ends])
    assert difference(ends[0].state, reference.state) <= EXACT
    for end in ends:
        assert end.logged == pytest.approx(reference.logged, rel=1e-12)
        assert end.samples == reference.samples


PADDED = pytest.mark.parametrize("is_padded", [True, False])


@PADDED
@pytest.mark.parametrize(("model", "passes"), [("plain", 2), ("plain", 1), ("norm", 1)])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.every(5)
def test_steps_of_unequal_shares(
    ranks2: RankPool, loss: str, model: str, passes: int, is_padded: bool
) -> None:
    changes: dict[str, Any] = {"loss": loss, "model": model, "passes": passes}
    job = dataclasses.replace(SYNC, **changes, is_padded=is_padded)
    check(ranks2, job, alone(job), env=FOUR_TO_ONE)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_ranks_without_samples_and_steps_without_a_token(
    ranks3: RankPool, loss: str, transport: str
) -> None:
    """What was accumulated before a step of padding alone is still there after it."""
    job = Job(
        samples=43,
        batch_size=2,
        epochs=2,
        loss=loss,
        passes=3,
        shuffle=False,
        options={"policy": "sync", "transport": transport, "bucket_cap_mb": 1e-4},
    )
    check(ranks3, job, alone(job))


def test_a_window_without_a_token_changes_nothing(ranks2: RankPool) -> None:
    """Where a window of a batch from each rank is padding alone there is no step."""
    options = {"policy": "cadence", "update": "gradients", "deterministic": True}
    job = Job(samples=43, batch_size=1, shuffle=False, options=options)
    reference = dataclasses.replace(job, batch_size=2)
    check(ranks2, job, alone(reference, steps_on_padding=False))


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_what_is_no_weight_is_refused_at_once(ranks2: RankPool, policy: str) -> None:
    options = {"policy": policy, "deterministic": True}
    first, second = ranks2.run(
        weigh_by, options, case_setup=serve_in_thread, expect_failure=True
    )
    number = 1 if policy == "sync" else 3
    expected = f"rank 1: weight_of gave -1 for batch {number} of epoch 0; expected"
    assert expected in str(second.error)
    assert expected in str(first.error)
