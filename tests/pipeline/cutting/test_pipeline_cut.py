"""Plain modules, cut by elche, train on real processes as one process does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from elche.schedule.generators.schedules import FIXED_SCHEDULES
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_cut_cases import (
    MODELS,
    Cut,
    ResNet,
    Together,
    alone,
    continued,
    generated,
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


@pytest.mark.parametrize(
    "model", [pytest.param("resnet", marks=pytest.mark.slow), "gpt"]
)
def test_a_rank_three_times_slower_gets_fewer_layers(
    ranks2: RankPool, model: str
) -> None:
    options = {"costs": "measure"}
    made = check(ranks2, Cut(model, schedule="1f1b", slow=1, options=options))
    layers = [0, 0]
    for rank, count in zip(made.placement, made.partition, strict=True):
        layers[rank] += count
    assert layers[1] <= layers[0] - 2, made


@pytest.mark.slow
def test_one_rank_of_four_three_times_slower(ranks4: RankPool) -> None:
    options = {"costs": "measure"}
    made = check(ranks4, Cut("resnet", schedule="1f1b", slow=2, options=options))
    layers = [0, 0, 0, 0]
    for rank, count in zip(made.placement, made.partition, strict=True):
        layers[rank] += count
    assert layers[2] == min(layers) < max(layers), made


def test_the_residual_net_is_resnet_18() -> None:
    with torch.device("meta"):
        net = ResNet(64, 1000)
    assert sum(one.numel() for one in net.parameters()) == 11_689_512
    assert sum(isinstance(one, torch.nn.Conv2d) for one in net.modules()) == 20
    assert "layer4.0.downsample.1.running_var" in net.state_dict()


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


@pytest.mark.parametrize("end_token", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_generation_is_that_of_one_process(
    ranks2: RankPool, end_token: int | None
) -> None:
    expected = continued(end_token)
    new = expected[1][:, 2:]
    assert len(set(new.flatten().tolist())) > 1
    assert (new[2].tolist() == [4, 4, 4, 5]) == (end_token is None), "it ends early"
    messages = (
        "ConfigError: expected tokens [sequences, length] of whole numbers",
        "ConfigError: expected max_new_tokens of at least 0, got -1",
        "ConfigError: expected one max_new_tokens, end_token and use_cache on all",
        "expected choose to return one token for each of 1 sequences",
    )
    pools = [[generated(end_token)]]
    pools.append(ranks2.run(generated, end_token, case_setup=serve_in_thread))
    for pool in pools:
        for found, wrong in pool:
            assert all(map(torch.equal, found, expected)), (found, expected)
            told = messages if len(pool) == 2 else (*messages[:2], messages[3])
            for text, wanted in zip(wrong, told, strict=True):
                assert wanted in text
