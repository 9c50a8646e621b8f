"""Layers move between ranks, and training goes on as if they had been there always."""

from __future__ import annotations

import pytest

from elche.runtime.process.coordinator import serve_in_thread
from tests.harness.rank_pool import RankPool
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_move_cases import (
    STEPS,
    Counts,
    MoveWork,
    accumulated,
    moved,
    moved_replicas,
    refused,
    trained_alone,
)

pytestmark = pytest.mark.distributed

TWO_RANKS = ((4, 4), (6, 2), (0, 8), (3, 5))
FOUR_RANKS = ((2, 2, 2, 2), (1, 3, 2, 2), (3, 0, 3, 2), (2, 2, 1, 3))
TWO_IN_V = ((2, 2, 2, 2), (1, 3, 3, 1), (5, 1, 1, 1))
FOUR_IN_V = ((1,) * 8, (2, 1, 1, 0, 0, 1, 1, 2), (1,) * 8)


def _check(pool: RankPool, given: MoveWork) -> list[list[Counts]]:
    state, losses = trained_alone(given)
    found = pool.run(moved, given, case_setup=serve_in_thread)
    assert furthest(found[0].state, state) <= 1e-12
    steps = float(STEPS * len(given.partitions))
    for one in found:
        assert one.losses == pytest.approx(losses, rel=1e-12)
        assert one.kept
        assert one.holds
        if given.optimizer != "sgd":
            assert set(one.steps) <= {steps}, "state has gone with the parameters"
    return [one.placements for one in found]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_two_ranks(ranks2: RankPool, model: str, optimizer: str) -> None:
    given = MoveWork(TWO_RANKS, model, optimizer=optimizer)
    placements = _check(ranks2, given)[0]
    assert placements == [(0, 1), (1,), (0, 1)], "rank 0 had no layers for a while"


@pytest.mark.parametrize(
    ("model", "schedule", "optimizer", "partitions"),
    [
        ("gpt", "zb-h1", "adamw", FOUR_RANKS),
        ("batchnorm", "1f1b", "sgd", FOUR_RANKS),
        ("gpt", "zb-v", "sgd", FOUR_IN_V),
    ],
)
def test_four_ranks(
    ranks4: RankPool,
    model: str,
    schedule: str,
    optimizer: str,
    partitions: tuple[Counts, ...],
) -> None:
    _check(ranks4, MoveWork(partitions, model, schedule, optimizer))


@pytest.mark.parametrize(
    ("model", "schedule", "built", "optimizer"),
    [
        ("gpt", "zb-v", "meta", "adamw"),
        ("mlp", "interleaved-zb", "factories", "sgd"),
        ("batchnorm", "auto", "factories", "adamw"),
        ("frozen-first", "zb-v", "modules", "named"),
        ("frozen-some", "auto", "modules", "named"),
    ],
)
def test_two_stages_on_each_rank(
    ranks2: RankPool, model: str, schedule: str, built: str, optimizer: str
) -> None:
    _check(
        ranks2,
        MoveWork(
            TWO_IN_V,
            model,
            schedule,
            optimizer,
            built=built,
            registered=built == "meta",
        ),
    )


def test_the_ranks_change_places(ranks2: RankPool) -> None:
    given = MoveWork(((4, 4), (5, 3), (2, 6)), "gpt", placements=(None, (1, 0), None))
    placements = _check(ranks2, given)[0]
    assert placements == [(1, 0), (1, 0)], "places stay until others are given"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "named"])
@pytest.mark.parametrize("built", ["modules", "meta"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "auto"])
@pytest.mark.parametrize("model", ["gpt", "mlp", "frozen-first", "shared", "lstm"])
def test_every_way_of_moving(
    ranks4: RankPool, model: str, schedule: str, built: str, optimizer: str
) -> None:
    partitions = FOUR_RANKS if schedule == "1f1b" else FOUR_IN_V
    _check(ranks4, MoveWork(partitions, model, schedule, optimizer, built=built))


def test_each_replica_moves_its_own_layers(ranks4: RankPool) -> None:
    found = ranks4.run(moved_replicas, case_setup=serve_in_thread)
    assert all(agrees for _, agrees in found)
    # The linear layers and the norm have two parameters each.
    assert [held for held, _ in found] == [[4, 6], [4, 4], [8, 10], [0, 0]]


def test_gradients_go_along(ranks2: RankPool) -> None:
    for away in ranks2.run(accumulated, case_setup=serve_in_thread):
        assert away
        assert max(away) <= 1e-12


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrong sum", "ConfigError: expected counts of 4 layers for 2 stages"),
        ("negative", "ConfigError: expected counts of 4 layers for 2 stages"),
        ("unknown rank", "ConfigError: expected ranks among [0, 1] as the placement"),
        ("no optimizer", "ConfigError: repartition needs optimizer="),
        (
            "no torch optimizer",
            "expected a torch optimizer over this rank's parameters",
        ),
        ("stranger's optimizer", "the optimizer of rank 1 does not hold 2.weight"),
        ("other counts", "ask for different partitions: [1, 3] on rank 0, [3, 1] on"),
        ("other class", "rank 0 gave the optimizers ['AdamW'], rank 1 ['SGD']"),
        ("other groups", "the groups of AdamW are [0] on rank 0 and [0, 1] on rank 1"),
        ("other settings", "group 0 of AdamW has lr 0.001 on rank 0 and 0.5 on rank 1"),
        ("odd state", "holds a object, which cannot travel"),
        ("other factory", "rank 1 builds layer 0 otherwise than rank 0 has it"),
        ("raising factory", "ValueError: no such layer here"),
        ("other call", "ranks call different methods: rank 0: repartition, rank 1:"),
    ],
)
def test_what_cannot_move_is_told_everywhere(
    ranks2: RankPool, kind: str, message: str
) -> None:
    for told, after in ranks2.run(refused, kind, case_setup=serve_in_thread):
        assert message in told
        assert after.startswith("[2, 2]"), "nothing has changed"
        assert after.endswith("True"), "and the next step is as ever"
