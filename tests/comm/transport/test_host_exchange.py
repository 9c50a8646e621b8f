"""Sums inside hosts first, then between them: real processes, pretended hosts."""

from __future__ import annotations

import pytest
import torch

from tests.comm.averaging.cases.overlap_cases import meeting
from tests.comm.transport.cases.host_sums import (
    kept_sum,
    kinds_of_buckets,
    late,
    messages_of,
    not_mapped,
    summed,
    written_too_early,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

COUNT = 7


def of(hosts: str) -> list[dict[str, str]]:
    """One letter per rank."""
    return [{"ELCHE_HOST": name} for name in hosts]


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abab", "abbc"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_message_is_the_sum_on_every_rank(
    ranks4: RankPool, hosts: str, dtype: torch.dtype
) -> None:
    for sums in (1, 2):
        found = ranks4.run(
            summed, COUNT, dtype, sums, case_setup=meeting, env=of(hosts)
        )
        sent = [messages_of(rank, COUNT, dtype) for rank in range(4)]
        close = 1e-12 if dtype is torch.float64 else 0.05
        for number, parts in enumerate(zip(*sent, strict=True)):
            first = found[0][number]
            assert all(torch.equal(first, each[number]) for each in found)
            torch.testing.assert_close(
                first.double(), sum(parts).double(), rtol=close, atol=close
            )


def test_a_sum_stays_while_another_host_may_lack_it(ranks3: RankPool) -> None:
    found = ranks3.run(kept_sum, case_setup=meeting, env=of("aab"))
    sent = [messages_of(rank, 2, torch.float64) for rank in range(3)]
    for first, ahead, last in found:
        torch.testing.assert_close(first, sum(each[0] for each in sent))
        assert torch.equal(ahead, first)
        torch.testing.assert_close(last, sum(each[1] for each in sent))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_sum_by_gloo_where_one_cannot_map(victim: int) -> None:
    with RankPool(3) as pool:  # the fault stays in its process
        env = of("aab")
        assert pool.run(not_mapped, victim, case_setup=meeting, env=env) == [True] * 3


def test_a_message_that_comes_too_early_is_refused(ranks3: RankPool) -> None:
    found = ranks3.run(written_too_early, case_setup=meeting, env=of("aab"))
    said = "rank 0 wrote message 2 before ranks [1] of its host had read the sum"
    assert found[0].startswith(said)
    assert found[1:] == ["", ""]


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (1, ["ranks that did not arrive: 1", "", "a test did not end within 0.5 s"]),
        (0, ["", "ranks that did not arrive: 0", "a test did not end within 0.5 s"]),
        (2, ["a test did not end within 0.5 s"] * 2 + [""]),
    ],
)
def test_every_wait_has_a_deadline(
    ranks3: RankPool, rank: int, says: list[str]
) -> None:
    found = ranks3.run(late, rank, case_setup=meeting, env=of("aab"))
    for said, expected in zip(found, says, strict=True):
        assert expected in said
        assert bool(said) == bool(expected)


def test_sums_that_come_a_pass_later_go_by_gloo(ranks3: RankPool) -> None:
    """Between two passes no leader would do anything for its host."""
    found = ranks3.run(kinds_of_buckets, case_setup=meeting, env=of("aab"))
    assert found == [("HostExchange", "GlooExchange")] * 3
