"""Frames: only what the other side sent on this connection, in order, comes through."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.control.frames import (
    GREETING_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    FrameCodec,
    nonce_of,
)
from elche.errors import ProtocolError

KEY, NONCE = b"k" * 32, b"n" * NONCE_BYTES
HEAD_BYTES = 4 + TAG_BYTES

messages = st.dictionaries(
    st.text(max_size=5),
    st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9),
    max_size=3,
)


def pair(
    key: bytes = KEY, nonce: bytes = NONCE, server: bool = False
) -> tuple[FrameCodec, FrameCodec]:
    """A sender of key and nonce, and a receiver of the usual ones."""
    sender = FrameCodec(key, nonce, is_server=server)
    return sender, FrameCodec(KEY, NONCE, is_server=not server)


def authentic(payload: bytes) -> bytes:
    """A frame of this payload as the sender would have signed it."""
    sender, _ = pair()
    return struct.pack(">I", len(payload)) + sender._tag(b"c", 0, payload) + payload


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 40)), st.booleans())
def test_what_is_sent_comes_out_however_it_is_cut(
    sent: list[dict[str, Any]], cuts: list[int], server: bool
) -> None:
    sender, receiver = pair(server=server)
    stream = b"".join(sender.encode(message) for message in sent)
    received = []
    for cut in cuts:
        received += receiver.feed(stream[:cut])
        stream = stream[cut:]
    received += receiver.feed(stream)
    assert received == sent


@given(st.data())
def test_a_changed_bit_is_refused(data: st.DataObject) -> None:
    sender, receiver = pair()
    frame = bytearray(sender.encode({"type": "Left", "rank": 3}))
    at = data.draw(st.integers(4, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError, match="not authentic"):
        list(receiver.feed(bytes(frame)))


@pytest.mark.parametrize("shorter", [1, 5])
def test_a_changed_length_is_refused(shorter: int) -> None:
    sender, receiver = pair()
    frame = sender.encode({"type": "Left", "rank": 3})
    length = struct.pack(">I", len(frame) - HEAD_BYTES - shorter)
    with pytest.raises(ProtocolError, match="not authentic"):
        list(receiver.feed(length + frame[4:]))


@pytest.mark.parametrize(
    ("key", "nonce"), [(b"j" * 32, NONCE), (b"", NONCE), (KEY, b"m" * NONCE_BYTES)]
)
def test_another_key_or_connection_is_refused(key: bytes, nonce: bytes) -> None:
    sender, receiver = pair(key, nonce)
    with pytest.raises(ProtocolError, match="not authentic"):
        list(receiver.feed(sender.encode({"a": 1})))


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 2), (2,)])
def test_replayed_reordered_and_dropped_frames_are_refused(
    order: tuple[int, ...],
) -> None:
    sender, receiver = pair()
    frames = [sender.encode({"a": number}) for number in range(3)]
    with pytest.raises(ProtocolError, match="not authentic"):
        list(receiver.feed(b"".join(frames[number] for number in order)))


def test_a_reflected_frame_is_refused() -> None:
    sender, _ = pair()
    frame = sender.encode({"a": 1})
    with pytest.raises(ProtocolError, match="not authentic"):
        list(sender.feed(frame))


@pytest.mark.parametrize("length", [MAX_PAYLOAD_BYTES + 1, 2**32 - 1])
def test_an_oversized_frame_is_refused_before_it_is_received(length: int) -> None:
    _, receiver = pair()
    with pytest.raises(ProtocolError, match=f"claims {length} bytes"):
        list(receiver.feed(struct.pack(">I", length) + bytes(TAG_BYTES)))


NONSENSE = {
    "nothing": b"",
    "reserved": b"\xc1",
    "list as key": b"\x81\x90\x01",
    "number as key": b"\x81\x01\x01",
    "no UTF-8": b"\xa1\xff",
    "bad timestamp": b"\xc7\x01\xff\x00",
    "short text": b"\xd9\xff",
    "endless map": b"\xdf\xff\xff\xff\xff",
    "deep": b"\x91" * 5000,
    "two values": b"\x01\x02",
}


@pytest.mark.parametrize("payload", NONSENSE.values(), ids=NONSENSE)
def test_authentic_nonsense_is_refused(payload: bytes) -> None:
    _, receiver = pair()
    with pytest.raises(ProtocolError, match="not msgpack"):
        list(receiver.feed(authentic(payload)))


def test_a_message_too_large_for_a_frame_is_refused_by_its_sender() -> None:
    # Once: it is sent, and the other side drops the connection without a reason.
    sender, _ = pair()
    with pytest.raises(ProtocolError, match=str(MAX_PAYLOAD_BYTES)):
        sender.encode({"a": bytes(MAX_PAYLOAD_BYTES + 1)})


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        MAGIC,
        MAGIC + NONCE[:-1],
        MAGIC + NONCE + b"x",
        b"elche/2\n" + NONCE,
        b"HTTP/1.1 400 Bad Request"[:GREETING_BYTES],
    ],
)
def test_whoever_greets_otherwise_is_no_coordinator(greeting: bytes) -> None:
    with pytest.raises(ProtocolError, match="greeting of an elche coordinator"):
        nonce_of(greeting)
