"""Frames of the control channel: authenticated msgpack, never pickle.

A connection begins with a greeting from the server (magic and a fresh nonce, in the
clear). After it both sides send frames::

    length (4 bytes, big endian) | tag (16 bytes) | payload (msgpack)

The tag is HMAC-SHA256 over key, nonce, direction, sequence number and payload. So a
frame from another run or connection, or a replayed, reordered or altered frame, is
refused. Contents are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgpack

from elche.comm.control.addresses import format_address, keep_alive
from elche.errors import CommunicationError, ProtocolError

MAGIC = b"elche/1\n"
NONCE_BYTES = 16
KEY_BYTES: Final = 32
"""Length of a run's key."""
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
TAG_BYTES = 16
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
HELLO_WITHIN_S = 10.0
HELLO_BYTES = 1 << 16
"""Limit of bytes received before a connection has identified itself."""
RESUME_S: Final = 20.0
"""Time limit (s) for a restarted coordinator to answer."""
UNREACHABLE_S: Final = 12.0
"""Time (s) without acknowledgement from the coordinator's machine until a rank ends.

The coordinator drops the rank earlier, after `SILENT_S`.
"""

_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")


class FrameCodec:
    """Encodes sent frames and decodes received frames of one connection.

    Args:
        key: shared secret of the run.
        nonce: nonce of the connection, from the server's greeting.
        is_server: True on the server's side.
    """

    def __init__(self, key: bytes, nonce: bytes, *, is_server: bool) -> None:
        self._key = key
        self._nonce = nonce
        self._directions = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def encode(self, message: dict[str, Any]) -> bytes:
        """Encodes a message as a frame.

        Raises:
            ProtocolError: the message exceeds the size limit.
        """
        payload: bytes = msgpack.packb(message, use_bin_type=True)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a message of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}"
            )
        tag = self._tag(self._directions[0], self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(payload)) + tag + payload

    def feed(self, data: bytes) -> Iterator[Any]:
        """Takes received bytes; yields the messages that are now complete.

        Raises:
            ProtocolError: a frame is not authentic or not msgpack; earlier messages
                have been yielded, and the connection is unusable.
        """
        self._buffer += data
        head = _LENGTH.size + TAG_BYTES
        while len(self._buffer) >= head:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_PAYLOAD_BYTES:
                raise ProtocolError(f"a frame claims {length} bytes")
            if len(self._buffer) < head + length:
                break
            tag = bytes(self._buffer[_LENGTH.size : head])
            payload = bytes(self._buffer[head : head + length])
            del self._buffer[: head + length]
            expected = self._tag(self._directions[1], self._received, payload)
            if not hmac.compare_digest(tag, expected):
                raise ProtocolError("a frame is not authentic (another key or run?)")
            self._received += 1
            try:
                message = msgpack.unpackb(payload, raw=False)
            except (ValueError, msgpack.exceptions.UnpackException) as error:
                raise ProtocolError(f"a frame is not msgpack: {error}") from error
            yield message

    def _tag(self, direction: bytes, sequence: int, payload: bytes) -> bytes:
        what = self._nonce + direction + _SEQUENCE.pack(sequence) + payload
        return hmac.digest(self._key, what, "sha256")[:TAG_BYTES]


def accept(key: bytes) -> tuple[bytes, FrameCodec]:
    """Returns a new connection's greeting and its codec, on the server's side."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return MAGIC + nonce, FrameCodec(key, nonce, is_server=True)


def nonce_of(greeting: bytes) -> bytes:
    """Returns the nonce of a server's greeting.

    Raises:
        ProtocolError: the peer is not an elche coordinator of this version.
    """
    if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
        raise ProtocolError(
            f"expected the greeting of an elche coordinator, got {greeting[:32]!r}"
        )
    return greeting[len(MAGIC) :]


Reconnect: TypeAlias = Callable[[], tuple[socket.socket, FrameCodec]]
"""Connects to a restarted coordinator; see `reach`."""


def reach(
    address: tuple[str, int], key: bytes, rank: int, timeout_s: float
) -> tuple[socket.socket, FrameCodec]:
    """Connects to the coordinator and reads its greeting.

    Raises:
        CommunicationError: no coordinator answers at the address.
    """
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
        keep_alive(connection)
        greeting = b""
        while len(greeting) < GREETING_BYTES:
            part = connection.recv(GREETING_BYTES - len(greeting))
            if not part:
                break
            greeting += part
        codec = FrameCodec(key, nonce_of(greeting), is_server=False)
    except (OSError, ProtocolError) as error:
        if connection is not None:
            connection.close()
        raise CommunicationError(
            f"rank {rank} cannot reach the coordinator at "
            f"{format_address(*address)}: {error}; was the script started by "
            "`elche run` or torchrun, and is that process still alive?"
        ) from error
    connection.settimeout(timeout_s)
    return connection, codec
