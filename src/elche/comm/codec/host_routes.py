"""Encoded sums of ranks that share hosts: inside a host first, then between hosts.

A link between hosts is slower than a host's own memory, and a host has one however many
ranks run on it. So the first rank of every host sums what its host's ranks have, as
they have it; these leaders form the encoded sum of the hosts' sums as ranks do that
have a host each (`codec_routes`), and pass it on. Between two hosts that is one message
each way, whatever the number of their ranks, and it is rounded once per host instead of
once per rank. All ranks get the bits that the leaders decode.

The leader's residual is that of its host's messages. Another rank's is empty, but for
what it brings from another membership, which it sends with its next contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.codec.codec import Codec, codec_named
from elche.comm.codec.codec_message import CodedMessage, chunks_of
from elche.comm.codec.codec_peers import Peers
from elche.comm.codec.codec_route import Route, Transfer
from elche.comm.codec.codec_routes import route_over
from elche.comm.transport.host_exchange import leaders_of
from elche.errors import CommunicationError


def host_route(
    peers: Peers,
    codec: Codec,
    numel: int,
    tag: int,
    hosts: Sequence[str],
    exact: int = 0,
) -> Route:
    """This rank's way to a sum over hosts.

    Args:
        peers: all ranks.
        codec: of messages between hosts.
        numel: elements of a message.
        tag: of the first of four kinds of messages; the same on all ranks.
        hosts: names of the ranks' hosts.
        exact: see `Route`.
    """
    leader = hosts.index(hosts[peers.rank])
    if peers.rank != leader:
        return HostMemberRoute(peers, codec, numel, tag, leader, exact)
    return HostLeaderRoute(peers, codec, numel, tag, hosts, exact)


@final
class LeaderPeers:
    """Some ranks, numbered anew.

    Args:
        peers: all ranks; this one is among the leaders.
        leaders: which ones.
    """

    def __init__(self, peers: Peers, leaders: Sequence[int]) -> None:
        self._peers = peers
        self.ranks: Sequence[int] = tuple(leaders)
        self.rank = self.ranks.index(peers.rank)
        self.world_size = len(self.ranks)

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        """Begins to send to a leader."""
        return self._peers.send_async(memory, self.ranks[to], tag)

    def receive_async(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive from a leader."""
        return self._peers.receive_async(memory, self.ranks[source], tag)

    def wait(self, work: Any, what: str) -> None:
        """Waits for either."""
        self._peers.wait(work, what)

    def look_out(self, ready: Callable[[], bool], what: str) -> None:
        """Waits as all ranks' peers do."""
        self._peers.look_out(ready, what)

    def explained(self, error: CommunicationError) -> Exception:
        """The same, and why, as all ranks' peers find out."""
        return self._peers.explained(error)


@final
class HostMemberRoute(Route):
    """Sends all it has to its host's leader, and gets the sum from it.

    Args:
        peers: all ranks.
        codec: of messages between hosts; this one's are plain.
        numel: elements of a message.
        tag: see :func:`host_route`.
        leader: this host's first rank.
        exact: see `Route`.
    """

    def __init__(
        self,
        peers: Peers,
        codec: Codec,
        numel: int,
        tag: int,
        leader: int,
        exact: int = 0,
    ) -> None:
        super().__init__(peers, codec, numel, tag, exact)
        plain, whole = codec_named("fp32"), range(numel)
        self._leader = leader
        self._offer = CodedMessage(plain, whole, exact=exact)
        self._answer = CodedMessage(plain, whole, exact=exact)
        self._offered: list[Transfer] = []

    @override
    def begin(self, values: torch.Tensor, residual: torch.Tensor) -> None:
        self._open(values)
        self._arrivals = [self._receive(self._leader, self._answer, 1)]
        self._encode(self._offer, residual)
        self._offered.append(self._send(self._leader, self._offer, 0))

    @override
    def advance(self, what: str) -> None:
        self._collect(self._arrivals, what)
        self._settle(self._offered, what)  # the leader had it when it answered
        self.total = self._answer.weight
        self._sum_exact([self._answer.exact])

    @override
    def read(self, start: int, out: torch.Tensor) -> None:
        self._answer.read(start, out)

    @override
    def parts(self) -> list[range]:
        return [range(self._numel)]

    @property
    def _message_bytes(self) -> int:
        return self._offer.memory.numel() + self._answer.memory.numel()

    @property
    @override
    def remote_bytes(self) -> int:
        return 0

    @property
    @override
    def has_encoded(self) -> bool:
        return True

    @override
    def keep_errors(self, residual: torch.Tensor) -> None:
        self._keep_own_errors(self._offer, residual)


@final
class HostLeaderRoute(Route):
    """Sums what its host's ranks have, and passes on the sum over all hosts.

    Args:
        peers: all ranks.
        codec: of messages between hosts.
        numel: elements of a message.
        tag: see :func:`host_route`.
        hosts: names of the ranks' hosts.
        exact: see `Route`.
    """

    def __init__(
        self,
        peers: Peers,
        codec: Codec,
        numel: int,
        tag: int,
        hosts: Sequence[str],
        exact: int = 0,
    ) -> None:
        super().__init__(peers, codec, numel, tag, exact)
        plain, whole = codec_named("fp32"), range(numel)
        own = hosts[peers.rank]
        members = [r for r in self._others if hosts[r] == own]
        self._between = route_over(
            LeaderPeers(peers, leaders_of(hosts)), codec, numel, tag, exact
        )
        self._gathered = {r: CodedMessage(plain, whole, exact=exact) for r in members}
        self._answers = [
            CodedMessage(plain, whole, exact=exact) for _ in range(2) if members
        ]
        self._host_sum = torch.zeros(
            numel + exact + 1, dtype=torch.float32, device="cpu"
        )
        self._turn = 0
        self._is_between = self._is_answered = False
        self.own = self._between.own
        self.ranks = 1 + len(members)

    @override
    def begin(self, values: torch.Tensor, residual: torch.Tensor) -> None:
        self._turn = self._open(values)
        self._residual = residual
        self._is_between = self._is_answered = False
        self._arrivals = [self._receive(r, m, 0) for r, m in self._gathered.items()]
        if not self._arrivals:
            self._begin_between()

    @property
    @override
    def is_done(self) -> bool:
        return self._is_answered

    @override
    def is_ready(self) -> bool:
        if self._is_between:
            return self._between.is_ready()
        return self._have_come(self._arrivals)

    @override
    def advance(self, what: str) -> None:
        if not self._is_between:
            self._collect(self._arrivals, what)
            self._begin_between()
            return
        self._between.advance(what)
        if self._between.is_done:
            self.total = self._between.total
            self._sum_exact([self._between.exact])
            self._answer()

    def _begin_between(self) -> None:
        """Sums the host's messages in the order of ranks, and begins with the hosts."""
        messages = [m for m in self._gathered.values() if m.weight != 0.0]
        for chunk in chunks_of(range(self._numel)):
            part = slice(chunk.start, chunk.stop)
            total = self._host_sum[part]
            if self._weight == 0.0:
                total.zero_()
            else:
                total.copy_(self._values[part])
            for message in messages:
                decoded = self._scratch[1, : len(chunk)]
                message.read(chunk.start, decoded)
                total.add_(decoded)
        self._sum_exact([self._own_exact, *(m.exact for m in messages)])
        self._host_sum[self._numel : -1].copy_(self.exact)
        self._host_sum[-1] = self._weight + sum(m.weight for m in messages)
        self._is_between = True
        self._between.begin(self._host_sum, self._residual)

    def _answer(self) -> None:
        """Passes the sum on to the host's other ranks."""
        self._is_answered = True
        if not self._gathered:
            return
        message = self._answers[self._turn]
        if self.total > 0.0:
            for part in self._between.parts():
                for chunk in chunks_of(part):
                    decoded = self._scratch[1, : len(chunk)]
                    self._between.read(chunk.start, decoded)
                    message.write(chunk.start, decoded)
        message.exact.copy_(self.exact)
        message.seal(self.total, self._number)
        self._last_sends[self._turn] = [
            self._send(rank, message, 1) for rank in self._gathered
        ]

    @override
    def read(self, start: int, out: torch.Tensor) -> None:
        self._between.read(start, out)

    @override
    def parts(self) -> list[range]:
        return self._between.parts()

    @property
    def _message_bytes(self) -> int:
        travelling = [*self._gathered.values(), *self._answers]
        held = sum(message.memory.numel() for message in travelling)
        return held + 4 * self._host_sum.numel() + self._between.host_bytes

    @property
    @override
    def sent_bytes(self) -> int:
        return super().sent_bytes + self._between.sent_bytes

    @property
    @override
    def remote_bytes(self) -> int:
        return self._between.sent_bytes

    @property
    @override
    def has_encoded(self) -> bool:
        return self._is_between and self._between.has_encoded

    @override
    def keep_errors(self, residual: torch.Tensor) -> None:
        self._between.keep_errors(residual)

    @override
    def flush(self, what: str) -> None:
        super().flush(what)
        self._between.flush(what)
