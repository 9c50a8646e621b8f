"""Pipelines on real processes train as one process does."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from elche.schedule.generators.schedules import FIXED_SCHEDULES
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import (
    MODELS,
    Work,
    drawn,
    furthest,
    piped,
    plain,
)

pytestmark = pytest.mark.distributed

SCHEDULES = (*FIXED_SCHEDULES, "auto")


def _check(pool: RankPool | None, work: Work) -> None:
    expected = plain(work)
    rel = 1e-12 if work.dtype == "float64" else 1e-5
    if pool is None:
        found = [piped(work)]
    else:
        found = pool.run(piped, work, case_setup=serve_in_thread)
    assert furthest(found[0].state, expected.state) <= rel
    for one in found:
        assert one.losses == pytest.approx(expected.losses, rel=rel)
        assert one.norm == pytest.approx(expected.norm, rel=rel)
        if expected.evaluated is not None:
            assert one.evaluated == pytest.approx(expected.evaluated, rel=rel)
    gradient = found[0].input_gradient
    if expected.input_gradient is None:
        assert gradient is None
    else:
        assert gradient is not None
        away = (gradient - expected.input_gradient).norm()
        assert away <= rel * expected.input_gradient.norm()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.every(3)
def test_every_schedule_on_four_ranks(
    ranks4: RankPool, schedule: str, model: str
) -> None:
    micro_batches = 4 if schedule.startswith("interleaved") else 5
    _check(ranks4, Work(model=model, schedule=schedule, micro_batches=micro_batches))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(ranks2: RankPool, schedule: str) -> None:
    _check(ranks2, Work(model="gpt", schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["several", "gpt"])
@pytest.mark.every(3)
def test_last_batches_of_few_samples(
    ranks4: RankPool, schedule: str, model: str
) -> None:
    """A whole batch, one sample, fewer samples than microbatches; one evaluated."""
    micro_batches = 4 if schedule.startswith("interleaved") else 5
    _check(
        ranks4,
        Work(
            model=model,
            schedule=schedule,
            micro_batches=micro_batches,
            sizes=(11, 1, 3),
            steps=3,
        ),
    )


PAIRS = [
    (model, ("zb-h1", "zb-v", "interleaved-zb", "1f1b")[number % 4])
    for number, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("model", "schedule"), PAIRS)
def test_every_model_on_two_ranks(ranks2: RankPool, model: str, schedule: str) -> None:
    _check(ranks2, Work(model=model, schedule=schedule))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_in_one_process(model: str) -> None:
    options = {"stages_per_rank": 4}
    _check(None, Work(model=model, schedule="interleaved-zb", options=options))


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        *(("autocast", "zb-v"), ("dropout", "zb-h1"), ("lstm", "v-half")),
        *(("gpt", "interleaved-zb"), ("shared", "zb-h2"), ("checkpoint", "v-min")),
    ],
)
@pytest.mark.every(2)
def test_single_precision(ranks2: RankPool, model: str, schedule: str) -> None:
    _check(ranks2, Work(model=model, schedule=schedule, dtype="float32"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_schedule_and_model(
    ranks2: RankPool, ranks4: RankPool, model: str, schedule: str, dtype: str
) -> None:
    work = Work(model=model, schedule=schedule, dtype=dtype)
    for pool in (None, ranks2, ranks4):
        _check(pool, work)


@pytest.mark.parametrize("seed", [None, 7])
def test_random_numbers(ranks2: RankPool, seed: int | None) -> None:
    """Ranks that seed alike draw alike afterwards; their layers begin apart, and
    no layer, microbatch or step has the mask of another. One rank draws the same.
    """
    found = ranks2.run(drawn, seed, case_setup=serve_in_thread)
    assert torch.equal(found[0].after, found[1].after)
    weights = {name: w for one in found for name, w in one.weights.items()}
    assert len(weights) == 8
    firsts = [weights[f"{layer}.0.weight"] for layer in range(4)]
    masks = [
        mask
        for one in found
        for both in one.zeroed.values()
        for mask in both.split(2)  # samples of a microbatch
    ]
    assert len(masks) == 4 * 2 * 2
    for values in (firsts, masks):
        assert not any(torch.equal(a, b) for a, b in combinations(values, 2))
    if seed is not None:
        alone = drawn(seed)
        assert all(torch.equal(w, alone.weights[name]) for name, w in weights.items())
        for one in found:
            for name, mask in one.zeroed.items():
                assert torch.equal(mask, alone.zeroed[name])


@pytest.mark.parametrize("seed", [None, 7])
def test_replicas_have_masks_of_their_own(ranks2: RankPool, seed: int | None) -> None:
    one, other = ranks2.run(drawn, seed, replicas=2, case_setup=serve_in_thread)
    for name, value in one.weights.items():
        assert torch.equal(other.weights[name], value)
    # With a seed they are those of one pipeline that has all microbatches.
    whole = drawn(seed, micro_batches=4) if seed is not None else None
    for name, mask in one.zeroed.items():
        assert not torch.equal(other.zeroed[name], mask)
        if whole is not None:
            parts = zip(mask.split(4), other.zeroed[name].split(4), strict=True)
            steps = [part for step in parts for part in step]
            assert torch.equal(torch.cat(steps), whole.zeroed[name])
