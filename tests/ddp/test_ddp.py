"""`elche.DistributedDataParallel` against one process and against torch's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.ddp.cases.ddp_cases import (
    Plan,
    Trace,
    alone,
    complete_when_sent,
    meeting,
    train,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

Gradients = dict[str, torch.Tensor | None]
TWO = ((5, 3), (8, 8), (1, 9), (4, 4), (7, 2))
THREE = ((5, 3, 2), (4, 4, 4), (1, 9, 2), (3, 3, 6))


def same(ours: Gradients, theirs: Gradients, bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        other = theirs[name]
        assert (mine is None) == (other is None), name
        if mine is not None and other is not None:
            size = max(1e-30, float(other.abs().max()))
            assert float((mine - other).abs().max()) <= bound * size, name


def equal_bits(traces: list[Trace]) -> None:
    for trace in traces[1:]:
        for mine, first in zip(trace.gradients, traces[0].gradients, strict=True):
            same(mine, first, 0.0)
        for name, value in trace.state.items():
            assert torch.equal(value, traces[0].state[name]), name


def check(ranks: RankPool, plan: Plan, bound: float = 1e-13) -> list[Trace]:
    """All ranks hold the same bits, and what one process gets."""
    traces = ranks.run(train, plan, case_setup=meeting)
    reference = alone(plan)
    equal_bits(traces)
    for ours, theirs in zip(traces[0].gradients, reference.gradients, strict=True):
        same(ours, theirs, bound)
    same(dict(traces[0].state), dict(reference.state), 10 * bound)
    return traces


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.every(3)
def test_unequal_batches_equal_one_process(
    ranks2: RankPool, ranks3: RankPool, loss: str, views: bool, transport: str
) -> None:
    options = {
        "loss_reduction": loss,
        "gradient_as_bucket_view": views,
        "transport": transport,
        "bucket_cap_mb": 2e-4,
    }
    plan = Plan(TWO, loss=loss, options=options)
    traces = check(ranks2, plan)
    assert traces[0].weights == [(float(a), float(b)) for a, b in TWO]
    check(ranks3, dataclasses.replace(plan, sizes=THREE, model="deep"))


def test_ranks_without_a_batch_hold_nobody_up(ranks3: RankPool) -> None:
    sizes = ((0, 3, 2), (4, 0, 0), (0, 0, 5), (2, 2, 2), (0, 6, 0))
    traces = check(ranks3, Plan(sizes, model="deep", options={"bucket_cap_mb": 1e-4}))
    assert traces[1].weights[1] == (4.0, 0.0, 0.0)


def test_unused_parameters_may_vary(ranks3: RankPool) -> None:
    plan = Plan(
        ((2, 3, 4),) * 5,
        model="branches",
        branches=((0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1), (0, 0, 1)),
        options={"find_unused_parameters": True, "bucket_cap_mb": 1e-4},
    )
    traces = check(ranks3, plan)
    assert traces[0].gradients[0]["branches.1.weight"] is None
    assert all(g["branches.2.weight"] is None for g in traces[0].gradients)


@pytest.mark.parametrize(
    ("model", "dtype", "bound"),
    [
        ("tied", "float64", 1e-13),
        ("mlp", "bfloat16", 0.1),
        ("mlp", "float16", 0.02),
    ],
)
def test_kinds_of_parameters(
    ranks2: RankPool, model: str, dtype: str, bound: float
) -> None:
    sizes = ((5, 3), (2, 6), (4, 4))
    plan = Plan(sizes, model=model, dtype=dtype)
    traces = check(ranks2, plan, bound)
    assert traces[0].gradients[0].get("frozen.weight") is None


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 2e-4},
        {"find_unused_parameters": True, "transport": "gloo"},
        {"strategy": "synchronous", "bucket_cap_mb": 2e-4},
    ],
)
def test_accumulated_passes_of_another_share_each(
    ranks2: RankPool, loss: str, options: dict[str, Any]
) -> None:
    """Each pass weighs by its own samples: the mean over the union of all."""
    sizes = ((5, 3), (8, 6), (7, 2))  # halves of 3 and 2, 2 and 1, ...
    options = {**options, "loss_reduction": loss}
    check(ranks2, Plan(sizes, loss=loss, micro=2, options=options))


@pytest.mark.parametrize("strategy", ["overlapped", "synchronous"])
def test_strategies_differ_in_when_buckets_go(ranks2: RankPool, strategy: str) -> None:
    for complete in ranks2.run(complete_when_sent, strategy, case_setup=meeting):
        buckets = len(complete)
        assert buckets > 3
        overlapped = list(range(1, buckets + 1))
        assert complete == (
            overlapped if strategy == "overlapped" else [buckets] * buckets
        )
