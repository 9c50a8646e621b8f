"""Shares and micro-batches of devices that hold few samples: nothing lost, nothing
counted twice, and the step that one device would have taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases.tasks import difference, identical, label_sum
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.cases.memory_cases import BATCH, SAMPLES, Seen, fitted, looped

pytestmark = pytest.mark.distributed

EXACT = 1e-12


def devices(*memory: int | None, speeds: tuple[str, ...] = ("1", "0.25")) -> Any:
    """Emulated ones; the fast one first."""
    return [
        {
            "ELCHE_SPEED": speed,
            "ELCHE_MS_PER_SAMPLE": "0.2",
            "ELCHE_MEMORY_SAMPLES": None if samples is None else str(samples),
        }
        for speed, samples in zip(speeds, memory, strict=True)
    ]


def all_positions(ranks: list[Seen]) -> list[int]:
    return sorted(at for rank in ranks for order in rank.orders for at in order)


def once_per_epoch(epochs: int = 2) -> list[int]:
    return sorted(list(range(SAMPLES)) * epochs)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_a_share_that_does_not_fit_is_run_in_micro_batches(
    ranks2: RankPool, loss_reduction: str
) -> None:
    options: dict[str, Any] = {"loss_reduction": loss_reduction}
    options["speed_hints"] = (1.0, 0.25)
    if loss_reduction == "sum":
        options["max_grad_norm"] = 1.0
    fast, slow = ranks2.serve(fitted, options, env=devices(4, None))
    alone = fitted({k: v for k, v in options.items() if k != "speed_hints"})
    assert fast.failures == 3  # 13 samples, then 7, then 5
    assert slow.failures == 0
    assert fast.cap == 4
    assert max(fast.sizes) <= 4
    assert fast.warnings[0].startswith("13 samples do not fit cpu; it gets at most 7")
    assert sum(fast.shares[0]) == pytest.approx(1.0)
    assert len(fast.sizes) > 2 * SAMPLES // BATCH
    assert all_positions([fast, slow]) == once_per_epoch()
    assert identical([fast.state, slow.state])
    assert difference(fast.state, alone.state) <= EXACT
    if loss_reduction == "mean":
        assert fast.losses == pytest.approx(alone.losses, rel=1e-9)
    assert fast.scalars == pytest.approx([(SAMPLES - 1) / 2] * 2, rel=1e-9)


@pytest.mark.parametrize("weighs", [False, True])
def test_memory_that_ends_in_backward_after_buckets_were_sent(
    ranks2: RankPool, weighs: bool
) -> None:
    options = {"bucket_cap_mb": 1e-4, "speed_hints": (1.0, 0.25)}
    more: dict[str, Any] = {"weight_of": label_sum} if weighs else {}
    ranks = ranks2.serve(
        fitted, options | more, backward_most=8, env=devices(None, None)
    )
    alone = fitted(more)
    assert [rank.failures for rank in ranks] == [1, 0]
    assert ranks[0].sent_before[0] >= 1
    assert ranks[0].cap == 7
    assert identical([rank.state for rank in ranks])
    assert difference(ranks[0].state, alone.state) <= EXACT
    counted = sum(len(order) for rank in ranks for order in rank.orders)
    assert counted == 2 * SAMPLES + 13  # the attempt that failed in backward


@pytest.mark.parametrize(
    ("policy", "update"),
    [("cadence", "parameters"), ("cadence", "gradients"), ("async", "parameters")],
)
def test_windows_run_their_batches_in_micro_batches(
    ranks2: RankPool, policy: str, update: str
) -> None:
    options = {"policy": policy, "update": update, "deterministic": True}
    options["local_batch_size"] = 16
    states = []
    for memory in (None, 6):
        ranks = ranks2.serve(
            fitted, options, env=devices(None, memory, speeds=("1", "1"))
        )
        assert [rank.failures for rank in ranks] == [0, 0 if memory is None else 2]
        assert all_positions(ranks) == once_per_epoch()
        assert identical([rank.state for rank in ranks])
        states.append(ranks[0].state)
    assert difference(states[1], states[0]) <= EXACT


def test_a_loop_of_the_users_own_gets_shares_within_the_caps(ranks2: RankPool) -> None:
    options = {"policy": "sync", "speed_hints": (1.0, 0.25), "max_samples": {0: 7}}
    ranks = ranks2.serve(looped, options, env=devices(7, None))
    alone = looped({"policy": "sync"})
    assert ranks[0].sizes[0] == max(ranks[0].sizes) == 7
    steps = zip(ranks[0].sizes, ranks[1].sizes, strict=True)
    assert {one + other for one, other in steps} == {BATCH}
    for epoch in (0, 1):
        got = [at for rank in ranks for at in rank.orders[epoch]]
        assert sorted(got) == sorted(alone.orders[epoch]) == list(range(SAMPLES))
    assert identical([rank.state for rank in ranks])
    assert difference(ranks[0].state, alone.state) <= EXACT


def test_a_loop_of_the_users_own_is_told_what_to_do(ranks2: RankPool) -> None:
    first, second = ranks2.run(
        looped, {"policy": "sync"}, 4, case_setup=serve_in_thread, expect_failure=True
    )
    assert "OutOfMemoryError: no room for 8" in str(second.error)
    assert "its share of 8 samples did not fit the device of rank 1" in str(first.error)
    assert "max_samples={1: 4}" in str(first.error)
