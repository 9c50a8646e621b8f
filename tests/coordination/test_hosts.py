"""Which hosts make a run together, and which ranks each has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.hosts import host_refusal, ranks_by_host
from elche.coordination.protocol.host_messages import OPEN, HostJoins, HostWelcome
from elche.coordination.protocol.wire import (
    FROM_HOSTS,
    FROM_LEADER,
    from_wire,
    to_wire,
)

FIRST = HostJoins(
    node_rank=0,
    nnodes=3,
    ranks=2,
    name="a",
    address="10.0.0.1",
    versions=(("elche", "1"), ("torch", "2.9")),
)
OTHER = replace(FIRST, node_rank=1, name="b", address="10.0.0.2")


def test_hosts_that_fit() -> None:
    assert not host_refusal(OTHER, [FIRST])
    assert not host_refusal(replace(OTHER, node_rank=2), [FIRST, OTHER])
    local = replace(FIRST, address="127.0.0.1")
    assert not host_refusal(replace(OTHER, address="::1"), [local])
    first, late = (replace(each, nnodes=OPEN) for each in (FIRST, OTHER))
    assert not host_refusal(late, [first])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nnodes": 2}, "host 1 (b) was started with --nnodes 2, host 0 with 3"),
        ({"nnodes": OPEN}, "b and host 0 (a) were started differently"),
        ({"node_rank": 0}, "b was started with --node-rank 0, which a has; expected"),
        ({"node_rank": 2}, "b was started with --node-rank 2, which c has; expected"),
        ({"node_rank": 3}, "--node-rank 3; expected each of 0 to 2 once"),
        ({"ranks": 0}, "host 1 (b) has 0 ranks"),
        (
            {"versions": (("elche", "1"), ("torch", "2.10"))},
            "host 1 (b) has torch 2.10, host 0 (a) has 2.9; install the same",
        ),
        ({"versions": ()}, "host 1 (b) has elche None"),
        ({"address": "127.0.1.1"}, "host 1 (b) would be reached at 127.0.1.1"),
    ],
)
def test_hosts_that_do_not_fit(change: dict[str, object], match: str) -> None:
    third = replace(FIRST, node_rank=2, name="c")
    joined = replace(OTHER, **change)  # type: ignore[arg-type]
    assert match in host_refusal(joined, [FIRST, third])


def test_the_first_host_may_be_the_one_that_nobody_reaches() -> None:
    alone = replace(FIRST, address="127.0.1.1")
    assert "host 0 (a) would be reached at 127.0.1.1" in host_refusal(OTHER, [alone])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.randoms())
def test_every_rank_is_one_hosts(counts: list[int], random: object) -> None:
    hosts = [
        replace(FIRST, node_rank=number, ranks=count)
        for number, count in enumerate(counts)
    ]
    random.shuffle(hosts)  # type: ignore[attr-defined]
    found = ranks_by_host(hosts)
    assert [len(found[number]) for number in range(len(counts))] == counts
    ranks = [rank for number in range(len(counts)) for rank in found[number]]
    assert ranks == list(range(sum(counts)))


def test_messages_come_as_they_were_sent() -> None:
    welcome = HostWelcome(first=2, world_size=5, environment=(("A", "b"),))
    assert from_wire(to_wire(OTHER), FROM_HOSTS) == OTHER
    assert from_wire(to_wire(welcome), FROM_LEADER) == welcome
