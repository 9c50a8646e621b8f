"""Messages on the wire: what goes out comes in, anything else is refused."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import Interrupted, RankLost, Tick
from elche.coordination.protocol.wire import (
    FROM_COORDINATOR,
    FROM_WORKERS,
    from_wire,
    to_wire,
)
from elche.errors import ProtocolError
from tests.harness.reached import reach

ALL = FROM_WORKERS | FROM_COORDINATOR
KINDS = sorted(ALL.values(), key=lambda kind: kind.__name__)

texts = st.text(max_size=12)
BASIC: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    bytes: st.binary(max_size=12),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: texts,
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    if hint in BASIC:
        return BASIC[hint]
    parts = typing.get_args(hint)
    if type(None) in parts:
        return st.none() | values_of(next(p for p in parts if p is not type(None)))
    assert typing.get_origin(hint) is tuple, hint
    if parts[1:] == (Ellipsis,):
        return st.lists(values_of(parts[0]), max_size=3).map(tuple)
    return st.tuples(*map(values_of, parts))


def messages_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


messages = st.sampled_from(KINDS).flatmap(messages_of)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=6) | st.binary(max_size=3), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def through_msgpack(wire: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(wire, use_bin_type=True), raw=False)


def refused_or_read(wire: Any, known: dict[str, type[Any]]) -> None:
    """Either a valid message of its type, or ProtocolError."""
    try:
        message = from_wire(wire, known)
    except ProtocolError:
        return
    assert type(message) in known.values()


@given(messages)
@settings(max_examples=300)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert from_wire(through_msgpack(to_wire(message)), ALL) == message


def test_what_only_the_shell_may_say_does_not_come_from_the_wire() -> None:
    for message in (RankLost(rank=0), Tick(), Interrupted(by="SIGINT")):
        with pytest.raises(ProtocolError, match="unknown message type"):
            from_wire(to_wire(message), FROM_WORKERS)


@given(plain)
@example({"type": None})
@example(b"Left")
@settings(max_examples=300)
def test_anything_that_is_no_message_is_refused(wire: Any) -> None:
    refused_or_read(wire, ALL)


@pytest.mark.reaches("refusals", "messages read")
@given(messages, st.data())
@settings(max_examples=300)
def test_a_field_of_a_wrong_type_is_refused_by_name(
    message: Any, data: st.DataObject
) -> None:
    wire = through_msgpack(to_wire(message))
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(message)]))
    likely = st.sampled_from([0, 1, 0.5, True, "x", None, []])  # fits some field
    wire[name] = data.draw(likely | plain)
    try:
        read = from_wire(wire, ALL)
    except ProtocolError as error:
        refusal = str(error)
        reach("refusals")
    else:
        refusal = ""
        reach("messages read")
        hint = typing.get_type_hints(type(message))[name]
        if hint in (int, bool, str):
            assert type(getattr(read, name)) is hint
    assert not refusal or f"{type(message).__name__}.{name}" in refusal


@given(messages, st.data())
def test_a_missing_field_is_refused(message: Any, data: st.DataObject) -> None:
    wire = to_wire(message)
    del wire[data.draw(st.sampled_from([f.name for f in dataclasses.fields(message)]))]
    with pytest.raises(ProtocolError, match="expected fields"):
        from_wire(wire, ALL)


@pytest.mark.parametrize("name", ["more", b"more", b"rank"])
def test_a_field_too_many_is_refused(name: str | bytes) -> None:
    # Once: a name of bytes (msgpack allows it) breaks the message: TypeError.
    wire: dict[Any, Any] = to_wire(FROM_WORKERS["Left"](rank=0))
    wire[name] = 1
    with pytest.raises(ProtocolError, match="expected fields"):
        from_wire(through_msgpack(wire), ALL)


@pytest.mark.parametrize(
    "value",
    [[0] * 1_000_000, "x" * 1_000_000, b"x" * 1_000_000],
    ids=["list", "text", "bytes"],
)
def test_a_refusal_of_something_huge_is_short(value: Any) -> None:
    # Once: the refusal repeats the whole value, and is logged.
    for wire in ({"type": "Left", "rank": value}, {"type": value, "rank": 0}):
        with pytest.raises(ProtocolError, match=r"expected|unknown") as refused:
            from_wire(wire, FROM_WORKERS)
        assert len(str(refused.value)) < 1000
