"""Encoded sums over real processes and gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from elche.comm.codec.codec import CODECS
from tests.comm.averaging.cases.overlap_cases import meeting
from tests.comm.codec.cases.codec_cases import (
    Seen,
    bereaved,
    beside_collectives,
    disagreeing,
    many_sums,
    offered,
    stood_up,
    uncoded,
)
from tests.comm.peers import exchanges, summed
from tests.distributed.cases.tasks import Task, identical, shared
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

LOSSY = ("bf16", "int8", "int4")
NUMELS = (1, 3, 130, 300_003)
ROUNDS = 4


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool = request.getfixturevalue(f"ranks{request.param}")
    assert isinstance(pool, RankPool)
    return pool


def expected(
    codec: str, world_size: int, numel: int, rounds: int
) -> list[torch.Tensor]:
    """The sums that ranks in one process get."""
    _, ends = exchanges(world_size, CODECS[codec], numel + 1)
    return [
        summed(ends, [offered(rank, number, numel) for rank in range(world_size)])[0]
        for number in range(rounds)
    ]


@pytest.mark.parametrize("codec", LOSSY)
def test_every_rank_gets_the_same_bits(ranks: RankPool, codec: str) -> None:
    found = ranks.run(many_sums, codec, NUMELS, ROUNDS, case_setup=meeting)
    for index, numel in enumerate(NUMELS):
        known = expected(codec, ranks.world_size, numel, ROUNDS)
        for number in range(ROUNDS):
            for each in found:
                assert torch.equal(each[index].sums[number], known[number])


def test_the_sum_is_near_the_true_one(ranks: RankPool) -> None:
    found = ranks.run(many_sums, "int8", (100_003,), 2, case_setup=meeting)
    for number in range(2):
        sent = [offered(rank, number, 100_003) for rank in range(ranks.world_size)]
        true = torch.stack(sent).sum(0)
        off = float((found[0][0].sums[number] - true).norm() / true.norm())
        assert 0.0 < off < 0.02


def test_other_collectives_may_begin_in_any_order_meanwhile(ranks3: RankPool) -> None:
    found = ranks3.run(beside_collectives, "int4", 20, case_setup=meeting)
    known = expected("int4", 3, 5000, 20)
    for number in range(20):
        assert all(torch.equal(each[number], known[number]) for each in found)


def told_to(rank: int, dead: int, peer: str) -> str:
    """How a rank is told of a death: where it waits, or where it begins to talk."""
    waits = f"a test: the message of rank {peer} failed on rank {rank}"
    return f"{waits}|(send|recv) between ranks {rank} and {dead} failed"


@pytest.mark.faults
def test_a_rank_that_dies_is_told_and_the_reduction_is_done_again(
    ranks3: RankPool,
) -> None:
    codec, numel = "int4", 200_003
    ended = ranks3.run(bereaved, codec, numel, case_setup=meeting, expect_failure=True)
    assert ended[2].error is not None
    assert ended[2].error.way == "died"
    survivors: list[Seen] = [ended[rank].value for rank in (0, 1)]
    for rank, seen in enumerate(survivors):
        assert re.search(told_to(rank, 2, r"\d"), seen.error), seen
    # As if the one that died had left after the first sum.
    _, three = exchanges(3, CODECS[codec], numel + 1)
    _, two = exchanges(2, CODECS[codec], numel + 1)
    summed(three, [offered(rank, 0, numel) for rank in range(3)])
    for before, after in zip(three[:2], two, strict=True):
        after.load_residual(before.residual)
    known = summed(two, [offered(rank, 1, numel) for rank in range(2)])
    for rank, seen in enumerate(survivors):
        assert torch.equal(seen.sums[1], known[rank])
        assert torch.equal(seen.residual, two[rank].residual)


@pytest.mark.faults
def test_a_rank_left_alone_is_told(ranks2: RankPool) -> None:
    ended = ranks2.run(bereaved, "int8", 1000, case_setup=meeting, expect_failure=True)
    assert ended[0].error is None
    assert re.search(told_to(0, 1, "1"), ended[0].value.error), ended[0].value


@pytest.mark.faults
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "closes"])
def test_a_message_that_nobody_answers_holds_nothing(
    ranks3: RankPool, tmp_path: Path, waits: bool
) -> None:
    codec, numel = "int4", 1000
    found = ranks3.run(
        stood_up, codec, numel, str(tmp_path), waits=waits, case_setup=meeting
    )
    _, ends = exchanges(3, CODECS[codec], numel + 1)
    summed(ends, [offered(rank, 0, numel) for rank in range(3)])
    for rank, seen in enumerate(found[:2]):
        if waits:
            assert "a test: the message of rank" in seen.error
            assert f"failed on rank {rank}: " in seen.error
        # What is under way is no part of the state.
        assert torch.equal(seen.residual, ends[rank].residual)


def test_ranks_that_want_different_codecs_are_refused(ranks2: RankPool) -> None:
    told = ranks2.run(disagreeing, ("int8", "int4"), (10, 10), case_setup=meeting)
    known = (
        "ranks disagree about a message: rank 0 has 11 elements in int8, blocks of "
        "128, rank 1 has 11 elements in int4, blocks of 32"
    )
    assert told == [known, known]
    told = ranks2.run(disagreeing, ("int8", "int8"), (10, 12), case_setup=meeting)
    assert all("rank 1 has 13 elements in int8" in each for each in told)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_policies_train_in_encoded_form(ranks2: RankPool, policy: str) -> None:
    options = {"policy": policy, "codec": "int8", "transport": "gloo"}
    task = Task(samples=320, optimizer="adamw", options=options)
    traces = ranks2.run(shared, task, case_setup=serve_in_thread, env=FOUR_TO_ONE)
    assert identical([trace.state for trace in traces])
    assert sum(len(order) for trace in traces for order in trace.orders) == 640


def test_what_is_not_encoded_goes_through_a_plain_exchange(ranks2: RankPool) -> None:
    for kinds in ranks2.run(uncoded, case_setup=meeting):
        assert kinds == ["GlooExchange", "GlooExchange"]
