"""An exchange with encoded messages and error feedback.

It sums out of place and gives all ranks the same bits, like other exchanges. But the
sum is rounded, and the rounding error is added to the next message (`coded_hops`).
"""

from __future__ import annotations

import itertools
import math
import time
from enum import Enum
from typing import final

import torch
from typing_extensions import override

from elche.comm.codec.codec import CODECS, Codec
from elche.comm.codec.coded_hops import CodedHops
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ElcheError, MismatchError, ProtocolError

AGREEING = "agreeing on the tags of a message"
TAGS_PER_EXCHANGE = 2
FIRST_OPENING = 1 << 20
"""First opening number; lower tags belong to other messages of the group."""
POLL_S = 5e-4
"""Pause (s) between two polls of a wait."""
_openings = itertools.count(FIRST_OPENING)


class _Phase(Enum):
    """Progress of the current message.

    ::

        IDLE ──begin──> BEGUN ──poll, wait: the sum is complete──> ARRIVED
         ^                │                                          │
         │                └──an error, rollback──> BROKEN (final)    │
         └──────────────────release, commit, rollback────────────────┘

    ``commit`` before the sum arrives adopts the message's errors and keeps its phase.
    """

    IDLE = "nothing is under way"
    BEGUN = "a message is under way"
    ARRIVED = "a sum is ready"
    BROKEN = "a message failed or was dropped"


@final
class CodedExchange(Exchange):
    """A message of float32 elements and their weight, summed in encoded form.

    The last element of a message is its weight, sent as float32 like the optional exact
    elements before it. A rank of weight 0 sends zeros, even for NaN, and keeps its
    residual; if all weights are 0, the sum is zero. A contribution that is not finite
    (or reaches 2^127) makes the whole sum NaN on every rank and keeps residuals
    unchanged.

    Made by :func:`open_coded_exchange`. It advances whenever any exchange of its group
    is polled or waited for. A broken exchange and its group are unusable; load its
    :attr:`residual` into another exchange.

    Args:
        group: process group of the ranks.
        codec: encoding of the messages.
        numel: number of elements of a message, including exact elements and weight.
        tag: first of two tags of its transfers, the same on all ranks.
        exact: number of elements before the weight that are sent as float32.
    """

    keeps_contribution = True

    def __init__(
        self, group: Group, codec: Codec, numel: int, tag: int = 0, exact: int = 0
    ) -> None:
        super().__init__(1)
        self._group = group
        self._numel = numel - 1 - exact
        self._hops = CodedHops(group, codec, self._numel, tag, exact)
        self._contribution = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._result: torch.Tensor | None = None
        self._phase = _Phase.IDLE
        self._has_sum = self._is_kept = False
        self._error: Exception | None = None

    @property
    def residual(self) -> torch.Tensor:
        """Last committed residual; flat, float32, not a copy."""
        return self._hops.residual

    def load_residual(self, residual: torch.Tensor) -> None:
        """Continues from another exchange's residual, of any codec and world size.

        Raises:
            MismatchError: the residual has another number of elements.
            ProtocolError: a message is in flight.
        """
        self._check_idle("load_residual()")
        if residual.shape != self.residual.shape:
            raise MismatchError(
                f"expected a residual of {self._numel} elements, got "
                f"{list(residual.shape)}; the residual belongs to other parameters"
            )
        self.residual.copy_(residual)

    @property
    @override
    def extra_bytes(self) -> int:
        """Host memory (bytes) of residuals and messages."""
        return self._hops.held_bytes

    @property
    def is_finite(self) -> bool:
        """True if all contributions to the last sum were finite."""
        return math.isfinite(self._hops.total)

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._contribution

    @override
    def result(self, side: int) -> torch.Tensor:
        if self._result is None:
            self._result = torch.zeros_like(self._contribution)
        return self._result

    @torch.no_grad()
    def begin(self, side: int) -> None:
        """Encodes the contribution and begins to send it; :meth:`wait` raises failures.

        Raises:
            ProtocolError: another message is in flight, the exchange is broken, or the
                weight is negative.
        """
        self._check_idle("begin()")
        weight = float(self._contribution[-1])
        if weight < 0.0:
            raise ProtocolError(f"expected a weight that is not negative, got {weight}")
        self._has_sum = self._is_kept = False
        self._phase = _Phase.BEGUN
        self._group.exchanges.add(self)
        try:
            self._hops.begin(self._contribution)
        except ElcheError as error:
            self._break(error)

    @override
    def poll(self) -> bool:
        """Advances all exchanges of the group; see :meth:`Exchange.poll`.

        Only :meth:`wait` detects the death of a rank.
        """
        for exchange in tuple(self._group.exchanges):
            exchange._advance()
        return self._phase is not _Phase.BEGUN

    @override
    def wait(self, what: str) -> None:
        def polled() -> bool:  # a wait in gloo would end only with the connection
            is_over = self.poll()
            if not is_over:
                time.sleep(POLL_S)
            return is_over

        while self._phase is _Phase.BEGUN:
            try:
                self._group.wait_until(polled, what)
                if self._phase is _Phase.BEGUN:
                    self._step(what)
            except ElcheError as error:
                self._break(error)
        if type(self._error) is CommunicationError:  # has no explanation yet
            raise self._group.on_failure(str(self._error), ()) from self._error
        if self._error is not None:
            raise self._error

    @property
    @override
    def has_sum(self) -> bool:
        self.poll()
        return self._phase is _Phase.ARRIVED

    @torch.no_grad()
    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        if not self._has_sum:
            raise ProtocolError(f"sum_into() was called when {self._phase.value}")
        total = self._hops.total
        if stop > self._numel:
            at = max(start, self._numel)
            tail = torch.cat([self._hops.exact, out.new_tensor([total])])
            out[at - start :] = tail[at - self._numel : stop - self._numel]
        if total > 0.0:
            self._hops.read(start, stop, out)
        else:
            out[: max(0, self._numel - start)].fill_(0.0 * total)

    def release(self) -> None:
        """Adopts the sum by :meth:`commit`; call after the last :meth:`sum_into`."""
        if self._phase is _Phase.ARRIVED:
            self.commit()

    def commit(self) -> None:
        """Commits this message's residual, because all ranks adopt the sum.

        Call it also on a rank that copies the sum from another rank. A second call for
        the same message does nothing.

        Raises:
            ProtocolError: no message was begun, or no rank can have the sum because
                this rank has not sent its part.
        """
        if self._is_kept:
            return
        if self._phase is _Phase.IDLE:
            raise ProtocolError("commit() was called before a sum began")
        if not self._hops.has_summed:
            raise ProtocolError(
                "no rank can have the sum, since this rank has not sent its part: "
                "repeat the reduction"
            )
        if not math.isnan(self._hops.total):
            self._hops.keep_errors()
        self._is_kept = True
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE

    def rollback(self) -> None:
        """Drops the message on all ranks and keeps the previous residual.

        An arrived sum is dropped. A message in flight breaks the exchange, because
        other ranks may be sending to it.
        """
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.IDLE
        elif self._phase is _Phase.BEGUN:
            self._break(
                CommunicationError(
                    "a message was dropped; open a new exchange in a new group"
                )
            )
        self._has_sum = False

    def flush(self, what: str) -> None:
        """Waits until all sends have completed.

        Call it before the group is closed or another exchange replaces this one.

        Raises:
            CommunicationError: a send failed.
        """
        try:
            self._hops.flush(what)
        except CommunicationError as error:
            raise self._group.on_failure(str(error), ()) from error

    def _advance(self) -> None:
        """Processes all messages that have arrived."""
        try:
            while self._phase is _Phase.BEGUN and self._hops.is_ready:
                self._step("summing in encoded form")
        except ElcheError as error:
            self._break(error)

    @torch.no_grad()
    def _step(self, what: str) -> None:
        if self._hops.step(what):
            self._phase, self._has_sum = _Phase.ARRIVED, True
            self._group.exchanges.discard(self)

    def _check_idle(self, call: str) -> None:
        if self._phase is not _Phase.IDLE:
            raise ProtocolError(
                f"{call} was called when {self._phase.value}; take the last sum first"
            )

    def _break(self, error: ElcheError) -> None:
        self._phase, self._error = _Phase.BROKEN, error
        self._group.exchanges.discard(self)

    def _collected(self) -> torch.Tensor:
        result = self.result(0)
        self.sum_into(0, result.numel(), result)
        return result


def open_coded_exchange(
    group: Group,
    numel: int,
    dtype: torch.dtype,
    codec: str,
    *,
    exact: int = 0,
    is_overlapped: bool = False,
) -> Exchange:
    """Makes an exchange with encoded messages; a collective call.

    Falls back to an unencoded exchange for ``"fp32"``, for other dtypes than float32,
    and for one rank. That exchange sums inside hosts first, unless it is overlapped.

    Args:
        group: process group of all ranks.
        numel: number of elements of a message; the last element is its weight.
        dtype: dtype of the message.
        codec: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the same on all ranks.
        exact: number of elements before the weight that are sent as float32.
        is_overlapped: True if training continues while a message is in flight.
    """
    cpu = torch.device("cpu")
    if codec != "fp32" and dtype == torch.float32 and group.world_size > 1:
        opening = torch.tensor([next(_openings)], device="cpu")
        group.broadcast(opening, AGREEING)  # a number that rank 0 has not used yet
        tag = TAGS_PER_EXCHANGE * int(opening)
        return CodedExchange(group, CODECS[codec], numel, tag, exact)
    opens = open_exchange if is_overlapped else open_by_hosts
    return opens(group, numel, dtype, cpu)
