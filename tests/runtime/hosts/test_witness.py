"""A witness keeps who has no key at a distance."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

import pytest

from elche.comm.control.frames import (
    GREETING_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
)
from elche.comm.control.key_file import KEY_BYTES
from elche.coordination.protocol.host_messages import VoteAsked
from elche.errors import CommunicationError
from elche.runtime.hosts import witness
from elche.runtime.hosts.witness import ask_witness, serve_witness

WAIT_S = 60.0
QUESTION = VoteAsked(run="a", node_rank=1, view=1)


def test_a_stranger_can_neither_ask_nor_fill_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(witness, "HELLO_WITHIN_S", 1e4)
    asyncio.run(asyncio.wait_for(_strangers(), 2 * WAIT_S))


async def _strangers() -> None:
    key = secrets.token_bytes(KEY_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    serving = asyncio.create_task(serve_witness(listener, key))
    with pytest.raises(CommunicationError, match="with the same --key-file"):
        await ask_witness(address, secrets.token_bytes(KEY_BYTES), QUESTION)
    reader, writer = await asyncio.open_connection(*address)
    await reader.readexactly(GREETING_BYTES)
    writer.write(struct.pack(">I", 1 << 25) + bytes(TAG_BYTES + HELLO_BYTES))
    ends = reader.readexactly(1), WAIT_S  # not for the connection's age
    ended = ConnectionResetError, asyncio.IncompleteReadError
    with pytest.raises(ended, match=r"reset by peer|0 bytes read"):
        await asyncio.wait_for(*ends)
    writer.close()
    first = VoteAsked(run="a", node_rank=0, view=2)
    assert await ask_witness(address, key, first)  # nobody else has the vote
    assert not await ask_witness(address, key, QUESTION)
    serving.cancel()


def test_strangers_do_not_fill_its_log(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(_many_strangers(64), WAIT_S))
    said = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert len(said) == 7
    assert said[-1].endswith("not authentic (another key or run?) (64 so far)")


async def _many_strangers(count: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address, key = listener.getsockname(), secrets.token_bytes(KEY_BYTES)
    serving = asyncio.create_task(serve_witness(listener, key))
    for _ in range(count):
        with pytest.raises(CommunicationError, match="does not answer"):
            await ask_witness(address, secrets.token_bytes(KEY_BYTES), QUESTION)
    serving.cancel()
