"""The witness of runs on several hosts: a process apart with one vote for each run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Final

from elche.comm.control.addresses import format_address
from elche.comm.control.drop_log import DropLog
from elche.comm.control.frames import HELLO_BYTES, HELLO_WITHIN_S, accept
from elche.coordination.protocol.host_messages import VoteAsked, VoteGiven
from elche.coordination.protocol.wire import FROM_HOSTS, from_wire, to_wire
from elche.coordination.succession import Witness
from elche.errors import CommunicationError, ProtocolError
from elche.runtime.hosts.launcher_link import LauncherLink

logger = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""For a witness to answer; one that does not in this time has no vote."""


async def serve_witness(listener: socket.socket, key: bytes) -> None:
    """Answers launchers that have this key, until it is cancelled."""
    witness, drops = Witness(), DropLog()

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer = writer.get_extra_info("peername")
        try:
            await asyncio.wait_for(
                _answer(witness, key, reader, writer), HELLO_WITHIN_S
            )
        except (OSError, asyncio.TimeoutError, ProtocolError) as error:
            drops.add(str(peer), error or "it asked nothing")
        finally:
            writer.close()

    async with await asyncio.start_server(answer, sock=listener) as server:
        await server.serve_forever()


async def _answer(
    witness: Witness,
    key: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    greeting, codec = accept(key)
    writer.write(greeting)
    read_bytes = 0
    while data := await reader.read(HELLO_BYTES):
        read_bytes += len(data)
        if read_bytes > HELLO_BYTES:
            raise ProtocolError("expected a host that asks, got a flood")
        for message in codec.feed(data):
            asked = from_wire(message, FROM_HOSTS)
            if not isinstance(asked, VoteAsked):
                raise ProtocolError(f"expected a host that asks, got {asked!r}")
            is_given = witness.ask(asked.run, asked.node_rank, asked.view)
            if asked.view:  # as where a run begins, to see that a witness is there
                said = "has" if is_given else "does not get"
                logger.warning(
                    "host %d of run %s %s the vote", asked.node_rank, asked.run, said
                )
            writer.write(codec.encode(to_wire(VoteGiven(is_given=is_given))))
            await writer.drain()


async def ask_witness(
    address: tuple[str, int], key: bytes, question: VoteAsked
) -> bool:
    """Whether the witness is for a host.

    Raises:
        CommunicationError: it does not answer.
    """
    try:
        return await asyncio.wait_for(_ask(address, key, question), ASK_S)
    except (OSError, EOFError, asyncio.TimeoutError, ProtocolError) as error:
        raise CommunicationError(
            f"the witness at {format_address(*address)} does not answer: "
            f"{error or 'nothing came'}; is `elche witness` running there, with the "
            "same --key-file?"
        ) from error


async def _ask(address: tuple[str, int], key: bytes, question: VoteAsked) -> bool:
    link = await LauncherLink.connect(address, key, ASK_S)
    with contextlib.closing(link):
        link.send(question)
        for message in await link.receive():
            if isinstance(message, VoteGiven):
                return message.is_given
    raise EOFError("it has ended the connection")
