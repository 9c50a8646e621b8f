"""Parameter averaging overlapped with training of the next window.

At a window's end the rank sends its drift θ_k − θ_r (:meth:`OverlappedAverager.
snapshot`) and continues training. A rank that trained knows its weight, so no rank
waits for a message. The plan (:meth:`OverlappedAverager.begin`) follows later, with the
outer step and the list of changed buffers.

When the mean has arrived, θ_{k+1} − θ_r is added to the current parameters, so steps
taken meanwhile are kept. The next drift is measured from θ_{k+1}, so no contribution is
lost or counted twice. One reduction is in flight at a time. (CO2, arXiv:2401.16265, and
Streaming DiLoCo, arXiv:2501.18512, also hide the outer reduction; they replace or blend
parameters instead of adding a correction.)

Cost: three model copies (θ_k, drift and message; in shared memory, θ_k and a message
that also holds the drift), half of one for an outer momentum. Optimizer state stays
local, or is reset when a mean is adopted.

In shared memory a message is overwritten when all ranks have adopted its mean. A rank
that closes its window before that keeps the drift in one more copy, and sends it with
the plan. The plan follows when all ranks have closed, and so have adopted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum

import torch

from elche.comm.averaging.averaging import WHAT, Averager
from elche.comm.averaging.window_sync import SyncResult
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import ProtocolError


class _Phase(Enum):
    """Progress of the only reduction.

    =======================================  ==========================  ======
    call                                     from                        to
    =======================================  ==========================  ======
    ``snapshot``, weight 0 or no ``begins``  IDLE, TAKEN, UNSENT         TAKEN
    ``snapshot``, weight > 0                 IDLE, TAKEN, UNSENT         SENT
    ``snapshot``, a rank lacks the last sum  IDLE, TAKEN, UNSENT         UNSENT
    ``begin``                                TAKEN, UNSENT, SENT         BEGUN
    ``finish``                               BEGUN                       IDLE
    ``rebase``                               IDLE, TAKEN, UNSENT         IDLE
    ``connect``, after a failed reduction    TAKEN, UNSENT, SENT, BEGUN  UNSENT
    ``copy_result``, to a rank that lacks it   SENT, UNSENT, BEGUN         IDLE
    =======================================  ==========================  ======

    ``connect`` does not change IDLE; any other call out of order is refused.
    """

    IDLE = "nothing has been taken"
    TAKEN = "a snapshot has been taken"
    UNSENT = "a snapshot has been taken, and is not in the message yet"
    SENT = "a drift has been sent"
    BEGUN = "a reduction is under way"


_AT_REST = (_Phase.IDLE, _Phase.TAKEN, _Phase.UNSENT)


class OverlappedAverager(Averager):
    """Averages while training continues (``async``).

    The order of calls is :meth:`snapshot`, :meth:`begin`, any number of :meth:`poll`,
    :meth:`finish`. A failed reduction may be repeated after :meth:`connect`.
    """

    is_overlapped = True
    _phase = _Phase.IDLE
    _window = -1
    # The last snapshot is finite; it is finite and has a positive weight.
    _is_finite = True
    _counts = False

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the current values as common, and drops the snapshot.

        Raises:
            ProtocolError: a reduction is in progress.
        """
        super().rebase()
        self._phase = _Phase.IDLE

    def _expect_rest(self, call: str) -> None:
        self._expect(call, *_AT_REST)

    @torch.no_grad()
    def connect(self, group: Group) -> None:
        """Switches to a new group, where an unfinished reduction may be repeated."""
        super().connect(group)
        if self._phase is not _Phase.IDLE:
            self._phase = _Phase.UNSENT

    @torch.no_grad()
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """See `Averager.copy_result`; a rank with a non-finite drift keeps no steps."""
        if lacks:
            self._expect("copy_result", _Phase.SENT, _Phase.UNSENT, _Phase.BEGUN)
        keeps = keeps and self._is_finite
        super().copy_result(group, source, plan, lacks=lacks, keeps=keeps)
        if lacks:
            self._phase = _Phase.IDLE

    @torch.no_grad()
    def snapshot(self, weight: float, *, begins: bool = True) -> bool:
        """Captures parameters and buffers at the window's end.

        Args:
            weight: weight of this rank's drift, relative to other ranks. If it is
                positive, the reduction begins now; with 0 it begins in :meth:`begin`,
                because possibly no rank has anything to reduce.
            begins: False to begin the reduction in :meth:`begin` in any case.

        Returns:
            True if all parameters are finite; otherwise their weight becomes 0.

        Raises:
            ConfigError: a parameter has another shape, dtype or device than before.
            ProtocolError: the last reduction has not been adopted.
        """
        self._expect("snapshot", *_AT_REST)
        self._refuse_changed()
        groups = self._groups
        is_free = all(group.exchange.is_read for group in groups)
        self._is_finite = all([each.fill(weight, is_free=is_free) for each in groups])
        self._buffers.take()
        self._phase = _Phase.TAKEN if is_free else _Phase.UNSENT
        if not self._is_finite:
            for group in groups:
                group.refill(0.0, is_free=is_free)
        self._counts = weight > 0.0 and self._is_finite
        if weight > 0.0 and begins and is_free:
            self._send()
        return self._is_finite

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """Begins the rest of a planned reduction, without waiting for other ranks.

        Raises:
            ProtocolError: there is no snapshot, or the plan's weight contradicts it.
        """
        self._expect("begin", _Phase.TAKEN, _Phase.UNSENT, _Phase.SENT)
        if (plan.weight > 0.0) != self._counts:
            raise ProtocolError(
                f"window {plan.window}: this rank's drift, of weight {plan.weight} in "
                f"the plan, {'has' if self._counts else 'has not'} been sent"
            )
        if self._phase is _Phase.UNSENT:
            for group in self._groups:  # by the plan, all ranks have read the last sum
                group.exchange.reclaim(WHAT)
                group.refill()
        if self._phase is not _Phase.SENT:
            self._send()
        self._buffers.begin(plan)
        self._phase, self._window = _Phase.BEGUN, plan.window

    def has_sum(self, plan: Reduce) -> bool:
        """See `Averager.has_sum`; begins a reduction whose plan is not begun yet."""
        if self._phase is _Phase.SENT:
            self.begin(plan)
        return self._phase is _Phase.BEGUN and super().has_sum(plan)

    def _take(self, weight: float, *, begins: bool) -> bool:
        return self.snapshot(float(weight > 0), begins=begins)

    def _send(self) -> None:
        for group in self._groups:
            group.begin()
        self._buffers.begin_known(is_active=self._counts)
        self._phase = _Phase.SENT

    def poll(self) -> bool:
        """True if :meth:`finish` would not wait.

        Raises:
            ProtocolError: no reduction is in progress.
        """
        self._expect("poll", _Phase.BEGUN)
        arrived = all(group.exchange.poll() for group in self._groups)
        return arrived and self._buffers.poll()

    @torch.no_grad()
    def finish(self, plan: Reduce, *, is_drained: bool = False) -> SyncResult:
        """Waits for the mean and applies it to the parameters.

        Args:
            plan: plan of the reduction in progress.
            is_drained: True if this rank took no step since the snapshot; its
                parameters become θ_{k+1} itself, bit-identical on all such ranks.

        Returns:
            The snapshot's distance from the mean.

        Raises:
            ProtocolError: another reduction is in progress, or none.
            CommunicationError: the reduction failed; this rank is unchanged.
        """
        self._expect("finish", _Phase.BEGUN)
        if plan.window != self._window:
            raise ProtocolError(
                f"expected to finish window {self._window}, got {plan.window}"
            )
        is_drained = is_drained or not self._is_finite
        result = super().finish(plan, is_drained=is_drained)
        self._phase = _Phase.IDLE
        return result if self._is_finite else replace(result, divergence=math.nan)

    def common(self) -> dict[int, torch.Tensor]:
        """Returns θ_k and integer buffers by the ID of the model's tensor.

        They are on the host, in the precision of averaging; read-only.
        """
        held = self._buffers.common_counts()
        for group in self._groups:
            held.update(group.common())
        return held

    def _expect(self, call: str, *phases: _Phase) -> None:
        if self._phase not in phases:
            raise ProtocolError(
                f"{call}() was called when {self._phase.value}; expected "
                + " or ".join(phase.value for phase in phases)
            )
