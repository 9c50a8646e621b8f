"""Connecting to the coordinator, including its greeting."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from elche.comm.control.addresses import format_address, keep_alive
from elche.comm.control.frames import GREETING_BYTES, FrameCodec, nonce_of
from elche.errors import CommunicationError, ProtocolError

RESUME_S: Final = 20.0
"""Time limit (s) for a restarted coordinator to answer."""
UNREACHABLE_S: Final = 12.0
"""Time (s) without acknowledgement from the coordinator's machine until a rank ends.

The coordinator drops the rank earlier, after `SILENT_S`.
"""


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
