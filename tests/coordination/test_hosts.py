"""Which hosts make a run together, and which ranks each has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.hosts import (
    PROTOCOL,
    host_refusal,
    in_own_words,
    ranks_by_host,
)
from elche.coordination.protocol.host_messages import OPEN, HostJoins, HostWelcome
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.protocol.wire import (
    FROM_HOSTS,
    FROM_LEADER,
    from_wire,
    to_wire,
)
from elche.errors import ProtocolError

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


ANYTHING = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    version=st.none() | st.integers(0, 99).filter(lambda v: v != PROTOCOL_VERSION),
    changed=st.dictionaries(
        st.sampled_from(["nnodes", "ranks", "address", "ports", "speed", "rack"]),
        ANYTHING,
        min_size=1,
    ),
    lacking=st.sets(st.sampled_from(["nnodes", "ranks", "address", "ports"])),
)
def test_another_version_is_named_whatever_its_other_fields_are(
    version: int | None, changed: dict[str, Any], lacking: set[str]
) -> None:
    own = ((PROTOCOL, str(PROTOCOL_VERSION)), *FIRST.versions)
    theirs = () if version is None else ((PROTOCOL, str(version)),)
    wire = to_wire(replace(OTHER, versions=theirs)) | changed
    wire = {name: each for name, each in wire.items() if name not in lacking}
    joined = from_wire(in_own_words(wire), FROM_HOSTS)
    assert host_refusal(joined, [replace(FIRST, versions=own)]) == (
        f"host 1 (b) has elche's protocol {version}, host 0 (a) has "
        f"{PROTOCOL_VERSION}; install the same on every host"
    )


@given(wire=ANYTHING | st.dictionaries(st.text(max_size=3), ANYTHING))
def test_other_messages_are_read_as_they_are(wire: Any) -> None:
    assert in_own_words(wire) is wire


@pytest.mark.parametrize("versions", [None, 1, [1], [[[], "a"]], [["a", "b", "c"]]])
def test_a_launcher_whose_versions_are_none_is_not_understood(versions: Any) -> None:
    wire = to_wire(OTHER) | {"versions": versions, "rack": 1}
    with pytest.raises(ProtocolError, match="HostJoins: expected fields"):
        from_wire(in_own_words(wire), FROM_HOSTS)


def test_a_launcher_of_this_version_has_its_fields() -> None:
    same = replace(OTHER, versions=((PROTOCOL, str(PROTOCOL_VERSION)),))
    assert from_wire(in_own_words(to_wire(same)), FROM_HOSTS) == same
    with pytest.raises(ProtocolError, match="HostJoins: expected fields"):
        from_wire(in_own_words(to_wire(same) | {"rack": 1}), FROM_HOSTS)
