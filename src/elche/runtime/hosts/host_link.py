"""Another host's launcher, and its ranks' processes, as the first host's sees them."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Final, Protocol, final

from elche.comm.control.addresses import outlive_cuts
from elche.comm.control.drop_log import DropLog
from elche.comm.control.frames import HELLO_BYTES, HELLO_WITHIN_S, accept
from elche.coordination.hosts import in_own_words
from elche.coordination.protocol.host_messages import (
    FromLeader,
    HostComes,
    HostInterrupted,
    HostJoins,
    HostTook,
    RankEnded,
    SignalRank,
)
from elche.coordination.protocol.wire import FROM_HOSTS, from_wire, to_wire
from elche.errors import ProtocolError

KILLED: Final = -int(signal.SIGKILL)
ANSWER_S: Final = 5.0
"""For another host's launcher to say that a rank which it is to kill has ended."""


class LinkOwner(Protocol):
    """Takes what comes from the other hosts' launchers.

    Attributes:
        drops: connections that kept to no protocol.
    """

    drops: DropLog

    def take_host(self, host: HostJoins, link: HostLink) -> None:
        """A launcher presents itself."""

    def host_comes(self, host: HostComes, link: HostLink) -> None:
        """A launcher comes whose leading host is lost."""

    def took(self, link: HostLink, message: HostTook) -> None:
        """It lives, and has so much of what it was sent."""

    def rank_ended(self, link: HostLink, message: RankEnded) -> None:
        """A rank's process has ended there."""

    def interrupted(self, link: HostLink, message: HostInterrupted) -> None:
        """It was sent a signal."""

    def lost(self, link: HostLink) -> None:
        """Its connection has ended."""


@final
class RemoteProcess:
    """A rank's process on another host, seen through that host's launcher.

    Args:
        link: to that launcher; None: it is gone, and has ended.
        rank: which.
    """

    def __init__(self, link: HostLink | None, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._has_ended = asyncio.Event()
        self.pid: int | None = None
        self.returncode: int | None = None

    def send_signal(self, number: int, /) -> None:
        """Has a signal sent; one that is to be killed has ended soon, or is gone."""
        assert self._link is not None
        self._link.send(SignalRank(rank=self._rank, number=int(number)))
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(ANSWER_S, self.end, KILLED)

    async def wait(self) -> int:
        """Waits for its end."""
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """It has ended, or its host is gone; the first word of it counts."""
        if self.returncode is None:
            self.returncode = code
            self._has_ended.set()


@final
class HostLink(asyncio.Protocol):
    """The connection of another host's launcher.

    Args:
        owner: takes what comes.
        key: the run's secret.
    """

    def __init__(self, owner: LinkOwner, key: bytes) -> None:
        self._owner = owner
        self._greeting, self._codec = accept(key)
        self._transport: asyncio.Transport | None = None
        self._unknown_bytes = 0
        self.host: HostJoins | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        outlive_cuts(transport.get_extra_info("socket"))
        transport.write(self._greeting)
        loop = asyncio.get_running_loop()
        loop.call_later(HELLO_WITHIN_S, self._drop_stranger)

    def data_received(self, data: bytes) -> None:
        """Reads messages; drops who does not keep to the protocol."""
        try:
            self._unknown_bytes += len(data) if self.host is None else 0
            if self._unknown_bytes > HELLO_BYTES:
                raise ProtocolError("expected a host's launcher, got a flood")
            for message in self._codec.feed(data):
                self._take(from_wire(in_own_words(message), FROM_HOSTS))
        except ProtocolError as error:
            peer = self._transport and self._transport.get_extra_info("peername")
            is_known = self.host is not None
            self._owner.drops.add(f"a launcher at {peer}", error, is_known=is_known)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """That launcher has ended."""
        self.closed.set()
        self._owner.lost(self)

    def send(self, message: FromLeader) -> None:
        """Sends a message, if the launcher is there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._codec.encode(to_wire(message)))

    def close(self) -> None:
        """Ends the connection when all is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends it, with what is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def _drop_stranger(self) -> None:
        if self.host is None:
            self.close()

    def _take(self, message: Any) -> None:
        if (self.host is None) != isinstance(message, HostJoins | HostComes):
            raise ProtocolError(f"a launcher sent {message!r} out of turn")
        if isinstance(message, HostJoins):
            self._owner.take_host(message, self)
        elif isinstance(message, HostComes):
            self._owner.host_comes(message, self)
        elif isinstance(message, HostTook):
            self._owner.took(self, message)
        elif isinstance(message, RankEnded):
            self._owner.rank_ended(self, message)
        elif isinstance(message, HostInterrupted):
            self._owner.interrupted(self, message)
