"""Plain modules, cut by elche, train on real processes as one process does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elche.schedule.generators.schedules import FIXED_SCHEDULES
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_cut_cases import (
    MODELS,
    Cut,
    Together,
    alone,
    together,
)

pytestmark = pytest.mark.distributed

FOUR_RANKS = (("gpt", False, "auto"),)
"""What `make test` runs on four; others are slow. One process or two run them."""


def check(pool: RankPool | None, work: Cut, micro_batches: int = 4) -> Together:
    """Losses, parameters and an evaluation of one sample are those of one process."""
    expected = alone(work, micro_batches)
    if pool is None:
        found = [together(work, micro_batches)]
    else:
        found = pool.run(together, work, micro_batches, case_setup=serve_in_thread)
    for one in found:
        assert one.trained.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.trained.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
        assert one.trained.state.keys() == expected.state.keys()
        state = {name: one.trained.state[name] for name in expected.state}
        assert furthest(state, expected.state) <= 1e-12
        assert one.again
    return found[0]


def cells(*slow: tuple[str, bool]) -> list[Any]:
    """Models, each cut at points with names and around its blocks."""
    return [
        pytest.param(*cell, marks=pytest.mark.slow if cell in slow else ())
        for cell in itertools.product(MODELS, (True, False))
    ]


@pytest.mark.parametrize(("model", "by_name"), cells(("resnet", True), ("gpt", False)))
def test_in_one_process(model: str, by_name: bool) -> None:
    options = {"stages_per_rank": 4}
    check(None, Cut(model, by_name, "interleaved-zb", options=options))


@pytest.mark.parametrize(("model", "by_name"), cells(("resnet", False), ("gpt", True)))
def test_on_two_ranks(ranks2: RankPool, model: str, by_name: bool) -> None:
    check(ranks2, Cut(model, by_name, "zb-v"))


@pytest.mark.parametrize(
    ("model", "by_name", "schedule"),
    [
        pytest.param(*case, marks=() if case in FOUR_RANKS else pytest.mark.slow)
        for case in itertools.product(
            ("resnet", "gpt"), (True, False), ("zb-h1", "auto")
        )
    ],
)
def test_on_four_ranks(
    ranks4: RankPool, model: str, by_name: bool, schedule: str
) -> None:
    check(ranks4, Cut(model, by_name, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule(ranks2: RankPool, model: str, schedule: str) -> None:
    check(ranks2, Cut(model, schedule=schedule))


def test_a_mask_beside_the_batch(ranks2: RankPool) -> None:
    check(ranks2, Cut("gpt", schedule="zb-h1", masked=True))


def test_a_model_without_values(ranks2: RankPool) -> None:
    options = {"init": bool}  # its values are loaded
    check(ranks2, Cut("gpt", schedule="zb-h1", on_meta=True, options=options))


def test_replicas_of_a_model_that_was_cut(ranks4: RankPool) -> None:
    work = Cut("gpt", sizes=(6, 3, 1), options={"replicas": 2})
    # Both replicas have the same batches, so the mean is that of one of them.
    expected = alone(work, 4)
    for one in ranks4.run(together, work, 4, case_setup=serve_in_thread):
        assert one.trained.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.trained.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
