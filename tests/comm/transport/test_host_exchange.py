"""Sums inside hosts first, then between them: real processes, pretended hosts."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elche.comm.transport.host_exchange import HostExchange, HostLeaders
from elche.errors import CommunicationError
from tests.comm.joined import meeting
from tests.comm.transport.cases.host_sums import (
    NUMEL,
    handed_over_twice,
    kind_of_bucket,
    late,
    messages_of,
    not_mapped,
    probed,
    summed,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


class Late:
    """A sum of the leaders that is seen to be over at the how manyth look."""

    def __init__(self, looks: int, error: str) -> None:
        self._looks, self._error = looks, error

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks <= 0

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class Lone:
    """All ranks, and all leaders, as the first of three sees them."""

    rank, world_size = 0, 3

    def __init__(self, looks: int, error: str) -> None:
        self._work = Late(looks, error)

    def all_reduce_async(self, tensor: torch.Tensor) -> Late:
        return self._work

    def wait_until(self, ready: Callable[[], bool], *_: Any) -> None:
        assert any(ready() for _ in range(100))

    def leave(self) -> None:
        """As the leaders' group is left with that of all."""

    def wait(self, work: Late, what: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{what}: {error}") from error


def of(hosts: str) -> list[dict[str, str]]:
    """One letter per rank."""
    return [{"ELCHE_HOST": name} for name in hosts]


@pytest.mark.parametrize("hosts", ["aabb", "abbc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.every(2)
def test_every_message_is_the_sum_on_every_rank(
    ranks4: RankPool, hosts: str, dtype: torch.dtype
) -> None:
    found = ranks4.run(summed, dtype, case_setup=meeting, env=of(hosts))
    sent = [messages_of(rank, 6, dtype) for rank in range(4)]
    close = 1e-12 if dtype is torch.float64 else 0.05
    for number, parts in enumerate(zip(*sent, strict=True)):
        assert all(torch.equal(found[0][number], each[number]) for each in found)
        torch.testing.assert_close(
            found[0][number].double(), sum(parts).double(), rtol=close, atol=close
        )


def test_who_was_handed_a_sum_can_hand_it_on(ranks3: RankPool) -> None:
    """Where whoever had it dies before all that lacked it have taken it."""
    found = ranks3.run(handed_over_twice, case_setup=meeting, env=of("aab"))
    total = sum(messages_of(rank, 2, torch.float64)[1] for rank in range(3))
    for (each,), factor in zip(found, (2.0, 1.0, 1.0), strict=True):
        torch.testing.assert_close(each, factor * total)


def test_a_probe_goes_the_way_that_gradients_go(ranks3: RankPool) -> None:
    found = ranks3.run(probed, case_setup=meeting, env=of("aab"))
    assert all(found_s > 0.0 for found_s, *_ in found)
    assert all(between < NUMEL for _, between, _ in found)
    assert [leaders for *_, leaders in found] == [NUMEL, 0, NUMEL]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_sum_by_gloo_where_one_cannot_map(victim: int) -> None:
    with RankPool(3) as pool:  # the fault stays in its process
        env = of("aab")
        assert pool.run(not_mapped, victim, case_setup=meeting, env=env) == [True] * 3


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


def test_buckets_are_summed_by_hosts(ranks3: RankPool) -> None:
    found = ranks3.run(kind_of_bucket, case_setup=meeting, env=of("aab"))
    assert found == ["HostExchange"] * 3


def begun(looks: int, error: str) -> tuple[HostLeaders, HostExchange]:
    """A message that this rank, which leads its host alone, has written."""
    group: Any = Lone(looks, error)
    leaders = HostLeaders(group, lambda _: group)
    leaders._leaders, leaders.members = group, [0]
    memory = mmap.mmap(-1, HostExchange.size_bytes(1, 4, torch.float32, 3))
    exchange = HostExchange(group, leaders, memory, 4, torch.float32, 2)
    exchange.contribution(0).fill_(2.0)
    exchange.begin(0)
    return leaders, exchange


def test_memory_of_what_is_under_way_is_let_go_with_the_group() -> None:
    leaders, exchange = begun(100, "")
    leaders.drive()
    known = weakref.ref(exchange)
    leaders._leave()
    del exchange
    assert known() is None  # before any collection of cycles


@pytest.mark.parametrize("error", ["", "a connection is closed"])
@pytest.mark.parametrize("looks", [1, 2, 3, 4])
@pytest.mark.every(3)
def test_who_has_waited_has_handed_the_sum_on(looks: int, error: str) -> None:
    # Once: a sum that ended between two looks was the leader's alone, until it looked
    # again, and in the next pass it waited for its host to have read it.
    _, exchange = begun(looks, error)
    if error:
        with pytest.raises(CommunicationError, match=f"a test: {error}"):
            exchange.wait("a test")
    else:
        exchange.wait("a test")
    assert [*exchange._summed] == [0 if error else 1]
    assert exchange.has_sum == (not error)
    if not error:
        assert exchange.finish("a test").tolist() == [2.0] * 4
        exchange.contribution(0).fill_(3.0)
        exchange.begin(0)
        assert exchange.last_sum.tolist() == [2.0] * 4  # until the next is taken
