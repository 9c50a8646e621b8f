"""Messages are summed alike through shared memory and through gloo."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elche.comm.transport.exchange import GlooExchange, SharedExchange, open_exchange
from tests.distributed.cases.tasks import Task, difference, identical, plain, shared
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed


def _sums(transport: str, sides: int, messages: int) -> list[torch.Tensor]:
    """Many messages in a row; rank 0's seed is 0, and so on."""
    import elche
    from elche.session.process import current_run
    from tests.distributed.cases.tasks import build

    model, optimizer, loader = build(Task())
    elche.setup(
        model,
        optimizer,
        loader,
        policy="cadence",
        transport=elche.config.TransportConfig(kind=transport),
    )
    run = current_run()
    assert run is not None
    group = run.worker.group
    cpu = torch.device("cpu")
    exchange = open_exchange(group, 1000, torch.float32, cpu, sides)
    assert isinstance(exchange, SharedExchange if transport == "auto" else GlooExchange)
    generator = torch.Generator().manual_seed(group.rank)
    results = []
    for number in range(messages):
        side = number % sides
        exchange.contribution(side).copy_(torch.randn(1000, generator=generator))
        exchange.begin(side)
        exchange.poll()
        results.append(exchange.finish("a test").clone())
        if sides == 1:
            group.all_reduce(torch.zeros(1), "the caller's own guarantee")
    elche.shutdown()
    return results


@pytest.mark.parametrize("sides", [1, 2])
def test_every_message_is_the_sum_on_every_rank(ranks3: RankPool, sides: int) -> None:
    found = {
        transport: ranks3.run(_sums, transport, sides, 60, case_setup=serve_in_thread)
        for transport in ("auto", "gloo")
    }
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for number in range(60):
        expected = sum(torch.randn(1000, generator=g) for g in generators)
        for transport, ranks in found.items():
            first = ranks[0][number]
            assert all(torch.equal(first, rank[number]) for rank in ranks), transport
            torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_policies_work_on_gloo(ranks2: RankPool, policy: str) -> None:
    task = Task(
        samples=320,
        dtype="float64",
        optimizer="adamw",
        model="norm" if policy == "cadence" else "mlp",
        options={"policy": policy, "transport": "gloo"},
    )
    reference = plain(dataclasses.replace(task, options={}))
    traces = ranks2.run(shared, task, case_setup=serve_in_thread, env=FOUR_TO_ONE)
    assert identical([trace.state for trace in traces])
    if policy == "sync":
        assert difference(traces[0].state, reference.state) <= 1e-12
