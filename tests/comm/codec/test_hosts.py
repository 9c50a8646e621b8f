"""Ranks on two virtual hosts: summed inside them first, in real processes."""

from __future__ import annotations

import pytest
import torch

from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_routes import sent_bytes
from elche.runtime.process.coordinator import serve_in_thread
from tests.comm.averaging.cases.averager_state_cases import Work, build, train
from tests.comm.averaging.cases.overlap_cases import local_step, meeting
from tests.comm.codec.cases.codec_cases import offered
from tests.comm.codec.cases.host_cases import both_ways
from tests.distributed.cases.tasks import Task, identical, plain, shared
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TWO_BY_TWO = [{"ELCHE_HOST": name} for name in ("one", "one", "two", "two")]
TURNS = [{"ELCHE_HOST": name} for name in ("one", "two", "two", "one")]
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
WINDOWS = 3


def reference() -> dict[str, torch.Tensor]:
    """Weighted averaging over four ranks, written out in one process."""
    common = build(Work()).double()
    for window in range(WINDOWS):
        drift = [torch.zeros_like(p) for p in common.parameters()]
        for rank, weight in enumerate(WEIGHTS):
            model = build(Work())
            model.load_state_dict(common.state_dict())
            for number in (10 * window, 10 * window + 1):
                local_step(model, rank, number)
            for total, own, base in zip(
                drift, model.parameters(), common.parameters(), strict=True
            ):
                total += weight * (base.detach() - own.detach().double())
        with torch.no_grad():
            for parameter, total in zip(common.parameters(), drift, strict=True):
                parameter.sub_(total)
    return dict(common.state_dict())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, TURNS], ids=["in order", "in turns"])
def test_the_weighted_mean_is_that_of_one_process(
    ranks4: RankPool, codec: str, hosts: list[dict[str, str]]
) -> None:
    work = Work(codec=codec, outer="average", weights=WEIGHTS)
    found = ranks4.run(train, work, 0, WINDOWS, None, case_setup=meeting, env=hosts)
    assert identical([each.model for each in found])
    tolerance = 1e-6 if codec == "fp32" else 2e-3
    for name, value in reference().items():
        torch.testing.assert_close(
            found[0].model[name].double(), value, rtol=0, atol=tolerance
        )
    leaders = sorted({hosts.index(each) for each in hosts})
    numel = sum(p.numel() for p in build(work).parameters())
    once = sent_bytes(CODECS[codec], numel, 2, 0)
    for rank, each in enumerate(found):
        assert each.remote_bytes == (WINDOWS * once if rank in leaders else 0)


@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_overlapped_and_interrupted_it_gives_the_same_bits(
    ranks4: RankPool, codec: str
) -> None:
    work = Work(True, codec, "slowmo", left_out=(1, 0))
    through = ranks4.run(train, work, 0, 6, None, case_setup=meeting, env=TURNS)
    saved = ranks4.run(train, work, 0, 3, None, case_setup=meeting, env=TURNS)
    found = ranks4.run(train, work, 3, 6, saved, case_setup=meeting, env=TURNS)
    assert identical([each.model for each in (*through, *found)])
    for one, other in zip(found, through, strict=True):
        known = other.averager["groups"][0]["residual"]["residual"]
        assert torch.equal(one.averager["groups"][0]["residual"]["residual"], known)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_half_as_much_crosses_between_two_hosts_of_two(
    ranks4: RankPool, codec: str
) -> None:
    numel = 100_003
    found = ranks4.run(both_ways, codec, numel, case_setup=meeting, env=TWO_BY_TWO)
    flat = sum(each.flat_bytes for each in found)
    by_hosts = sum(each.by_hosts_bytes for each in found)
    assert 0.49 < by_hosts / flat < 0.51
    assert [each.by_hosts_bytes > 0 for each in found] == [True, False, True, False]
    true = torch.stack([offered(rank, 0, numel) for rank in range(4)]).sum(0)
    for each in found:
        assert torch.equal(each.by_hosts, found[0].by_hosts)
        for total in (each.flat, each.by_hosts):
            off = float((total - true).norm() / true.norm())
            assert off < (1e-6 if codec == "fp32" else 0.02)


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("cadence", "int8"),
        ("async", "fp32"),
        pytest.param("cadence", "fp32", marks=pytest.mark.slow),
        pytest.param("async", "int8", marks=pytest.mark.slow),
    ],
)
def test_policies_train_on_two_hosts(ranks4: RankPool, policy: str, codec: str) -> None:
    task = Task(
        samples=400,
        batch_size=8,
        optimizer="adamw",
        options={"policy": policy, "codec": codec},
    )
    traces = ranks4.run(shared, task, case_setup=serve_in_thread, env=TWO_BY_TWO)
    assert identical([trace.state for trace in traces])
    seen = sorted(index for trace in traces for index in trace.orders[0])
    assert seen == sorted(plain(task).orders[0])
