"""Replicas of pipelines train as one process does on the union of their batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_replica_cases import (
    Outcome,
    Union,
    alone,
    bad_batches,
    begun,
    normed,
    not_built,
    stumbles,
    together,
)

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[3]
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v", "auto")


def scheduled(*names: str) -> tuple[dict[str, str], ...]:
    return tuple({"schedule": name} for name in names)


def check(pool: RankPool, work: Union) -> list[Outcome]:
    expected = alone(work)
    found = pool.run(together, work, case_setup=serve_in_thread)
    for one in found:
        assert furthest(one.state, expected.state) <= 1e-12
        assert one.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.norms == pytest.approx(expected.norms, rel=1e-12)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
        for name, there in one.has_gradient.items():
            assert expected.has_gradient[name] == there, name
        for name, value in one.state.items():
            assert torch.equal(value, found[0].state[name]), name
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.every(3)
def test_two_replicas_of_two_ranks(ranks4: RankPool, schedule: str, model: str) -> None:
    check(ranks4, Union(model=model, own=scheduled(schedule, schedule)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.every(2)
def test_batches_of_fewer_samples_than_microbatches(
    ranks4: RankPool, schedule: str
) -> None:
    sizes = ((6, 3), (1, 2), (0, 1))
    check(ranks4, Union(model="gpt", sizes=sizes, own=scheduled(schedule, "1f1b")))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.every(2)
def test_two_replicas_of_one_rank(ranks2: RankPool, schedule: str) -> None:
    check(ranks2, Union(model="gpt", own=scheduled(schedule, schedule)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.every(2)
def test_one_replica_of_two_ranks_in_another_order(
    ranks2: RankPool, schedule: str
) -> None:
    sizes = ((6,), (5,), (1,))
    own = scheduled(schedule)
    check(ranks2, Union(model="gpt", sizes=sizes, own=own, replicas=[[1, 0]]))


UNEQUAL = [
    ([[0, 1], [2]], ({"partition": (5, 3)}, {}), "gpt", ("1f1b", "gpipe")),
    ([[0, 1], [2]], ({"partition": (2, 6)}, {}), "mlp", ("zb-h1", "zb-h1")),
    ([[1], [2, 0]], ({}, {"partition": (3, 5)}), "frozen-first", ("gpipe", "zb-h1")),
]


@pytest.mark.parametrize(("replicas", "cuts", "model", "schedules"), UNEQUAL)
def test_replicas_of_different_partitions(
    ranks3: RankPool,
    replicas: list[list[int]],
    cuts: tuple[dict[str, object], ...],
    model: str,
    schedules: tuple[str, str],
) -> None:
    named = zip(cuts, scheduled(*schedules), strict=True)
    own = tuple({**cut, **name} for cut, name in named)
    check(ranks3, Union(model=model, replicas=replicas, own=own))


def test_each_replica_is_planned_from_what_its_ranks_measure(ranks3: RankPool) -> None:
    own = ({"sample": torch.zeros(2, 5, dtype=torch.int64)},) * 2
    options = {"schedule": "auto", "costs": "measure"}
    work = Union(model="gpt", replicas=[[0, 1], [2]], own=own, options=options)
    check(ranks3, work)


def test_replicas_of_different_schedules_and_microbatches(ranks4: RankPool) -> None:
    own = (
        {"schedule": "zb-v", "partition": (1, 3, 2, 2), "micro_batches": 3},
        {"schedule": "interleaved-1f1b", "partition": (2, 2, 2, 2)},
    )
    found = check(ranks4, Union(model="gpt", own=own))
    assert found[0].own_losses == [3, 3, 0]
    assert found[3].own_losses == [4, 0, 4]


@pytest.mark.parametrize(
    "work",
    [
        Union(loss_reduction="sum", own=scheduled("zb-h1", "zb-h1")),
        Union(model="experts", own=scheduled("zb-h1", "1f1b"), accumulated=2),
        Union(model="frozen-some", own=scheduled("zb-v", "zb-v"), loss_scale=1024.0),
        Union(
            model="several", own=scheduled("gpipe", "auto"), options={"guard": False}
        ),
        Union(model="only-biases", own=scheduled("zb-h1", "zb-h1"), clip=1e9),
    ],
    ids=["sum", "experts", "scaled", "several", "biases"],
)
def test_what_the_replicas_have_in_common(ranks4: RankPool, work: Union) -> None:
    expected = alone(work)
    found = check(ranks4, work)
    # The last batch is the second replica's alone.
    gradient = found[2].input_gradient
    if expected.input_gradient is not None:
        assert gradient is not None
        away = (gradient / work.loss_scale - expected.input_gradient).norm()
        assert away <= 1e-12 * expected.input_gradient.norm()
    assert found[0].input_gradient is None


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb"])
def test_the_reduction_begins_before_the_last_weight_gradient(
    ranks4: RankPool, schedule: str
) -> None:
    own = scheduled(schedule, schedule)
    for one in check(ranks4, Union(sizes=((6, 5),), own=own)):
        first_s, second_s = one.complete_s
        assert first_s <= one.last_action_s[0]
        assert second_s >= one.last_action_s[1]


def test_replicas_start_equal(ranks3: RankPool) -> None:
    states = ranks3.run(begun, case_setup=serve_in_thread)
    for state in states:
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), name


def test_statistics_of_batch_norm_are_the_mean_of_the_replicas(
    ranks3: RankPool,
) -> None:
    found = ranks3.run(normed, case_setup=serve_in_thread)
    own: list[dict[str, torch.Tensor]] = [{}, {}]
    for replica, local, _ in found:
        own[replica].update(local)
    state = found[0][2][0]
    for _, _, states in found:
        for other in states:
            for name, value in other.items():
                assert torch.equal(value.nan_to_num(), state[name].nan_to_num()), name
    for name in ("1.running_mean", "1.running_var", "3.running_mean"):
        assert not torch.equal(own[0][name], own[1][name])
        mean = (own[0][name] + own[1][name]) / 2
        assert torch.allclose(state[name], mean, rtol=1e-6, atol=0)
    assert own[1]["1.num_batches_tracked"] == 2
    assert state["1.num_batches_tracked"] == own[0]["1.num_batches_tracked"] == 4
    assert state["0.mask"].isnan().tolist() == [False, False, True]
    assert torch.equal(state["0.mask"][:2], torch.tensor([float("-inf"), 0.1]))


@pytest.mark.faults
def test_a_failing_stage_is_told_everywhere(ranks4: RankPool) -> None:
    found = ranks4.run(stumbles, case_setup=serve_in_thread)
    for rank, (first, second) in enumerate(found):
        own = "ValueError" if rank == 3 else "RemoteRankError: rank 3 failed"
        assert first.startswith(own)
        assert "a layer's own trouble" in first
        assert second.startswith("CommunicationError: the pipeline has ended (")


@pytest.mark.faults
def test_bad_batches_are_told_in_all_replicas(ranks2: RankPool) -> None:
    expected = [
        "ConfigError: replica 1 has a target but no batch",
        "",
        "ConfigError: replica 1 has a batch without a target, and others have one",
        "ConfigError: parameter 0.weight on rank 0 was frozen when the ranks",
        "",
    ]
    for found in ranks2.run(bad_batches, case_setup=serve_in_thread):
        for told, wanted in zip(found, expected, strict=True):
            assert told.startswith(wanted) if wanted else told == "", told


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "other shape",
            r"layer 1: 1.bias learns \[6\] .* on rank 0 of replica 0, and ",
        ),
        ("other settings", r"disagree about the settings"),
        ("other schedule", r"disagree about the schedule: rank 2 has"),
    ],
)
def test_what_cannot_be_built_is_told_everywhere(
    ranks4: RankPool, kind: str, message: str
) -> None:
    for told in ranks4.run(not_built, kind, case_setup=serve_in_thread):
        assert re.search(message, told), told
