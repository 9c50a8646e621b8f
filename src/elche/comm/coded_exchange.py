"""A sum over all ranks of messages that travel encoded, for slow links.

A :class:`CodedExchange` is an exchange like the others: contributions are kept, the
sum is out of place and the same to the bit on every rank. What differs is that the sum
is rounded, and that what the rounding took off is kept and sent later (*error
feedback*, see `codec_route`). That residual belongs to a rank's committed state: it
changes only when a sum has been taken (:meth:`Exchange.release`,
:meth:`Exchange.finish`, :meth:`CodedExchange.commit`), so a reduction that fails and
is done again elsewhere sends the same once more.

Memory: a message per side, a residual, and what travels
(:attr:`CodedExchange.extra_bytes`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, final

import torch

from elche.comm.codec import CODECS, Codec, codec_named
from elche.comm.codec_message import chunks_of
from elche.comm.codec_peers import GroupPeers, Peers
from elche.comm.codec_routes import route_over
from elche.comm.exchange import Exchange, open_exchange
from elche.comm.host_routes import host_route, spans_hosts
from elche.comm.process_group import Group
from elche.comm.shared_memory import Members
from elche.errors import CommunicationError, ElcheError, MismatchError, ProtocolError

AGREEING = "agreeing on a codec"
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TAGS_PER_EXCHANGE = 2
_openings = itertools.count()
_log = logging.getLogger(__name__)


class _Phase(Enum):
    """Where the one message is."""

    IDLE = "nothing is under way"
    BEGUN = "a message is under way"
    ARRIVED = "a sum is there"
    BROKEN = "a message failed or was given up"


@final
class CodedExchange(Exchange):
    """A message of float32 elements and their weight, summed in encoded form.

    The last element of a message is its weight: it travels as it is, and its sum is
    exact. A rank of weight 0 sends zeros, whatever else it holds, and keeps its
    residual; if all weigh nothing, the sum is zero. A contribution that is not finite
    (or reaches 2^127) makes the whole sum NaN on every rank and leaves residuals alone.

    Made by :func:`open_coded_exchange`. One message is under way at a time. An exchange
    that broke serves no more, and neither does its group; its :meth:`state_dict` goes
    on in another one.

    Args:
        peers: the other ranks.
        codec: of the messages.
        numel: elements of a message, its weight included.
        sides: independent contributions.
        tag: of its transfers; two belong to it, the same on all ranks.
        hosts: names of the ranks' hosts, if they are known; ranks that share one are
            summed there first.
    """

    keeps_contribution = True

    def __init__(
        self,
        peers: Peers,
        codec: Codec,
        numel: int,
        sides: int = 1,
        tag: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(sides)
        self._peers = peers
        self._codec = codec
        self._values = numel - 1
        self._contributions = [torch.zeros(numel) for _ in range(sides)]
        self._results: list[torch.Tensor | None] = [None] * sides
        self._residual = torch.zeros(self._values)
        self._route = (
            host_route(peers, codec, self._values, tag, hosts)
            if spans_hosts(hosts)
            else route_over(peers, codec, self._values, tag)
        )
        self._scratch = torch.empty(codec.block)
        self._phase = _Phase.IDLE
        self._side = 0
        self._has_sum = self._is_kept = False
        self._error: ElcheError | None = None

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent, without what the transport adds."""
        return self._route.sent_bytes

    @property
    def remote_bytes(self) -> int:
        """Of :attr:`sent_bytes`, those to other hosts; all if hosts are not known."""
        return self._route.remote_bytes

    @property
    def extra_bytes(self) -> int:
        """Host memory beside contributions and results: residual and what travels."""
        return 4 * self._residual.numel() + self._route.host_bytes

    def contribution(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.contribution`."""
        return self._contributions[side]

    def result(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.result`."""
        made = self._results[side]
        if made is None:
            made = self._results[side] = torch.zeros_like(self._contributions[side])
        return made

    @torch.no_grad()
    def begin(self, side: int) -> None:
        """Encodes the contribution and begins to send it.

        Raises:
            ProtocolError: another message is under way, or the exchange is broken.
            CommunicationError: the group is broken.
        """
        if self._phase is not _Phase.IDLE:
            raise ProtocolError(
                f"begin() came when {self._phase.value}; expected the last sum to have "
                "been taken"
            )
        self._side = side
        self._has_sum = self._is_kept = False
        self._phase = _Phase.BEGUN
        try:
            self._route.begin(self._contributions[side], self._residual)
        except ElcheError as error:
            self._break(error)
            raise

    def advance(self) -> None:
        """See :meth:`Exchange.advance`; what fails is raised by :meth:`wait`."""
        self.poll()

    @torch.no_grad()
    def poll(self) -> bool:
        """Does what can be done without waiting; see :meth:`Exchange.poll`.

        A rank that has died is not noticed here, only by :meth:`wait`.
        """
        try:
            while self._phase is _Phase.BEGUN and self._route.is_ready():
                self._step("summing in encoded form")
        except ElcheError as error:
            self._break(error)
        return self._phase is not _Phase.BEGUN

    @torch.no_grad()
    def wait(self, what: str) -> None:
        """See :meth:`Exchange.wait`."""
        try:
            while self._phase is _Phase.BEGUN:
                self._step(what)
        except ElcheError as error:
            self._break(error)
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        """See :meth:`Exchange.sum_into`."""
        if not self._has_sum:
            raise ProtocolError(f"sum_into() came when {self._phase.value}")
        if stop > self._values:
            out[self._values - start :].fill_(self._route.total)
        if not self._route.total > 0.0:
            out[: self._values - start].fill_(0.0 * self._route.total)
            return
        for part in self._route.parts():
            wanted = range(max(start, part.start), min(stop, part.stop))
            if wanted:
                self._read(wanted, part, out[wanted.start - start :])

    def release(self) -> None:
        """After the last :meth:`sum_into`: the sum is adopted, see :meth:`commit`."""
        if self._phase is _Phase.ARRIVED:
            self.commit()

    @torch.no_grad()
    def commit(self) -> None:
        """Every rank adopts the sum: what it left out of this rank's message is kept.

        That also holds for a rank on which it failed while another one had the result
        and all adopt that. A second call for the same message does nothing.

        Raises:
            ProtocolError: nothing was begun, or no rank can have the sum because this
                one has not sent its part of it.
        """
        if self._phase is _Phase.IDLE:
            if self._is_kept:
                return
            raise ProtocolError("commit() came when nothing was begun")
        if not self._route.has_encoded:
            raise ProtocolError(
                "no rank can have the sum: this one has not sent its part of it; "
                "expected the reduction to be done again"
            )
        if not self._is_kept and not math.isnan(self._route.total):
            self._route.keep_errors(self._residual)
        self._is_kept = True
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE

    def rollback(self) -> None:
        """Nobody adopts what was begun: the residual stays what it was before.

        A sum that had arrived is forgotten; a message still under way breaks the
        exchange, because others may be sending to it.
        """
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE
        elif self._phase is _Phase.BEGUN:
            self._break(
                CommunicationError(
                    "a message was given up; expected a new exchange in a new group"
                )
            )
        self._has_sum = False

    def flush(self, what: str) -> None:
        """Waits until all that was sent has left; before the group is closed.

        Raises:
            CommunicationError: it failed.
        """
        self._route.flush(what)

    def state_dict(self) -> dict[str, Any]:
        """The residual as last committed, a copy, and what it belongs to."""
        own = self._route.own
        return {
            "residual": self._residual.clone(),
            "own": (own.start, own.stop),
            "world_size": self._peers.world_size,
            "ranks": self._route.ranks,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from another exchange's residual, of any codec and world size.

        What was left out of a mean becomes part of this rank's message, and the other
        way round where this rank owns other elements now; exact for equal weights.

        Raises:
            MismatchError: it is the residual of other elements.
            ProtocolError: a message is under way.
        """
        if self._phase is not _Phase.IDLE:
            raise ProtocolError(f"load_state_dict() came when {self._phase.value}")
        residual = state["residual"]
        if residual.shape != self._residual.shape:
            raise MismatchError(
                f"expected a residual of {self._values} elements, got "
                f"{list(residual.shape)}; it belongs to other parameters"
            )
        self._residual.copy_(residual)
        own, ranks = self._route.own, self._route.ranks
        now = (own.start, own.stop, self._peers.world_size, ranks)
        begin, end = state["own"]
        if (begin, end, state["world_size"], state["ranks"]) != now:
            # From units of what was sent to those of one rank, and back.
            scale = torch.full_like(self._residual, float(state["ranks"]))
            scale[begin:end] = float(state["world_size"])
            self._residual.mul_(scale)
            scale.fill_(1.0 / ranks)
            scale[own.start : own.stop] = 1.0 / self._peers.world_size
            self._residual.mul_(scale)

    def _step(self, what: str) -> None:
        self._route.advance(what)
        if self._route.is_done:
            self._phase, self._has_sum = _Phase.ARRIVED, True

    def _break(self, error: ElcheError) -> None:
        self._phase, self._error = _Phase.BROKEN, error

    def _collected(self) -> torch.Tensor:
        result = self.result(self._side)
        if self._has_sum:
            self.sum_into(0, result.numel(), result)
            self.release()
        return result

    def _read(self, wanted: range, part: range, out: torch.Tensor) -> None:
        """Writes elements of one part; a block that is cut, by way of scratch."""
        block = self._codec.block
        at, end = wanted.start, wanted.stop
        while at < end:
            first = at - at % block
            whole = end if end == part.stop else end - end % block
            if first == at and at < whole:
                for chunk in chunks_of(range(at, whole)):
                    begin = chunk.start - wanted.start
                    self._route.read(chunk.start, out[begin : begin + len(chunk)])
                at = whole
                continue
            size = min(block, part.stop - first)
            self._route.read(first, self._scratch[:size])
            stop = min(end, first + size)
            begin = at - wanted.start
            out[begin : begin + stop - at].copy_(
                self._scratch[at - first : stop - first]
            )
            at = stop


def open_coded_exchange(
    group: Group, numel: int, dtype: torch.dtype, codec: str, sides: int = 1
) -> Exchange:
    """Makes an exchange whose messages travel encoded, together with all ranks.

    A plain one (:func:`open_exchange`) where encoding is not wanted or not possible:
    for elements that are not float32, for one rank, and for ``"fp32"``, unless the
    ranks are on several hosts and some of them share one: then float32 elements too are
    summed inside the hosts first (`host_routes`), and only what travels between hosts
    is encoded.

    Args:
        group: the process group.
        numel: elements of a message; the last one is its weight.
        dtype: of the message.
        codec: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the same on all ranks.
        sides: independent contributions.

    Raises:
        ConfigError: there is no such codec.
        MismatchError: the ranks ask for different messages; the error names them.
    """
    chosen, cpu = codec_named(codec), torch.device("cpu")
    if group.world_size == 1:
        return open_exchange(group, numel, dtype, cpu, sides)
    opening = _agree(group, chosen, dtype, numel, sides)
    hosts = group.hosts() if dtype == torch.float32 else ()
    if dtype != torch.float32 or (codec == "fp32" and not spans_hosts(hosts)):
        return open_exchange(group, numel, dtype, cpu, sides)
    tag = TAGS_PER_EXCHANGE * opening
    if spans_hosts(hosts) and group.rank == 0:
        _log.info(
            "%d ranks on %d hosts: sums are formed inside the hosts first, and "
            "travel between them in %s",
            group.world_size,
            len(set(hosts)),
            codec,
        )
    return CodedExchange(GroupPeers(group), chosen, numel, sides, tag, hosts)


def _agree(
    group: Members, codec: Codec, dtype: torch.dtype, numel: int, sides: int
) -> int:
    """Compares what ranks want; returns a number that rank 0 has not used before."""
    kind = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    wanted = [list(CODECS).index(codec.name), codec.block, numel, kind, sides]
    rows = torch.zeros(group.world_size, len(wanted) + 1, dtype=torch.int64)
    rows[group.rank] = torch.tensor([*wanted, next(_openings)])
    group.all_reduce(rows, AGREEING)
    first, *others = (row[:-1] for row in rows.tolist())
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise MismatchError(
                f"ranks disagree about a message: rank 0 has {_described(first)}, "
                f"rank {rank} has {_described(other)}"
            )
    return int(rows[0, -1])


def _described(row: list[int]) -> str:
    index, block, numel, kind, sides = row
    dtype = str(DTYPES[kind]).removeprefix("torch.") if kind < len(DTYPES) else "?"
    of = "" if kind == 0 else f" of {dtype}"
    way = ", overlapped" if sides > 1 else ""
    return f"{numel} elements{of} in {list(CODECS)[index]}, blocks of {block}{way}"
