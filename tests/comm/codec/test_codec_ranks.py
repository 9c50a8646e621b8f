"""Encoded sums over real processes and gloo."""

from __future__ import annotations

import pytest
import torch

from elche.comm.codec.codec import CODECS
from tests.comm.codec.cases.codec_cases import (
    beside_collectives,
    many_sums,
    offered,
    uncoded,
)
from tests.comm.joined import meeting
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
                assert torch.equal(each[index][number], known[number])


def test_other_collectives_may_begin_in_any_order_meanwhile(ranks3: RankPool) -> None:
    found = ranks3.run(beside_collectives, "int4", 20, case_setup=meeting)
    known = expected("int4", 3, 5000, 20)
    for number in range(20):
        assert all(torch.equal(each[number], known[number]) for each in found)


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
