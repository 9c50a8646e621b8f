"""Parameter averaging overlapped with training of the next window.

At a window's end the rank writes its drift θ_k − θ_r (:meth:`OverlappedAverager.
snapshot`), which begins its reduction, and trains on. A rank that trained knows its
weight, so no rank waits for a message; how the mean is applied, and which buffers have
begun to change, comes with the plan (:meth:`OverlappedAverager.begin`).
When the mean is there, θ_{k+1} − θ_r is added to what the parameters hold by then, so
steps taken meanwhile are kept; θ_{k+1} is what the next drift is measured from, so no
contribution is lost or counted twice. One reduction is in flight at a time. (CO2,
arXiv:2401.16265, and Streaming DiLoCo, arXiv:2501.18512, hide the outer reduction too;
they replace or blend parameters where this adds a correction.)

Cost: three model copies (θ_k, and the drift and a message; or, where ranks sum in
shared memory, two messages that are the drift as well, unless it is weighted), one more
for an outer momentum. Optimizer state stays local, or is reset when a mean is adopted.

A message in shared memory has two sides. A rank writes its message k + 2 where message
k was only after it has adopted k + 1, which all ranks sent, each after it had adopted
k.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch

from elche.comm.averaging.averaging import Averager
from elche.comm.averaging.consensus_distance import ConsensusSums, SyncResult
from elche.comm.averaging.outer import OuterStep
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
    ``begin``                                TAKEN, UNSENT, SENT         BEGUN
    ``adopt``                                BEGUN                       IDLE
    ``rebase``                               IDLE, TAKEN, UNSENT         IDLE
    ``connect``, after a failed reduction    TAKEN, UNSENT, SENT, BEGUN  UNSENT
    ``hand_over``, to a rank that lacks it   SENT, UNSENT, BEGUN         IDLE
    =======================================  ==========================  ======

    ``connect`` leaves IDLE as it is; any other call out of order is refused.
    """

    IDLE = "nothing has been taken"
    TAKEN = "a snapshot has been taken"
    UNSENT = "a snapshot has been taken, and is to be sent in a new group"
    SENT = "a drift has been sent"
    BEGUN = "a reduction is under way"


_AT_REST = (_Phase.IDLE, _Phase.TAKEN, _Phase.UNSENT)


class OverlappedAverager(Averager):
    """Averages while training goes on (``async``).

    The order of calls is :meth:`snapshot`, :meth:`begin`, any number of :meth:`poll`,
    :meth:`adopt`. A reduction that failed may be begun again after :meth:`connect`.
    """

    is_overlapped = True
    _phase = _Phase.IDLE
    _window = -1
    # Of the last snapshot: all of it is finite; that and it weighs something.
    _is_finite = True
    _counts = False

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common; what was taken is forgotten.

        Raises:
            ProtocolError: a reduction is under way.
        """
        self._expect("rebase", *_AT_REST)
        super().rebase()
        self._phase = _Phase.IDLE

    def state_dict(self) -> dict[str, Any]:
        """State beside the model; no reduction may be in progress."""
        self._expect("state_dict", *_AT_REST)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on from a saved state; nothing may be under way."""
        self._expect("load_state_dict", *_AT_REST)
        super().load_state_dict(state)

    @torch.no_grad()
    def connect(self, group: Group) -> None:
        """Takes a new group; what was under way may be begun again."""
        super().connect(group)
        if self._phase is not _Phase.IDLE:
            self._phase = _Phase.UNSENT

    @torch.no_grad()
    def hand_over(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """See `Averager.hand_over`; a rank whose part was not finite starts anew."""
        if lacks:
            self._expect("hand_over", _Phase.SENT, _Phase.UNSENT, _Phase.BEGUN)
        keeps = keeps and self._is_finite
        super().hand_over(group, source, plan, lacks=lacks, keeps=keeps)
        if lacks:
            self._phase = _Phase.IDLE

    @torch.no_grad()
    def snapshot(self, weight: float, *, begins: bool = True) -> bool:
        """Takes parameters and buffers as they are at the window's end.

        Args:
            weight: of this rank's drift, relative to the others'. If it is positive,
                the reduction begins now; with 0 only by :meth:`begin`, because it may
                be that no rank has anything to reduce.
            begins: False leaves the beginning to :meth:`begin` in any case.

        Returns:
            Whether all parameters are finite; otherwise they weigh nothing.

        Raises:
            ConfigError: a parameter has another shape, dtype or device than before.
            ProtocolError: the last reduction has not been adopted.
        """
        self._expect("snapshot", *_AT_REST)
        self._refuse_changed()
        self._is_finite = all([group.fill(weight) for group in self._groups])
        self._buffers.take()
        self._phase = _Phase.TAKEN
        if not self._is_finite:
            for group in self._groups:
                group.refill(0.0)
        self._counts = weight > 0.0 and self._is_finite
        if weight > 0.0 and begins:
            self._send()
        return self._is_finite

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """The plan is there: begins what has not begun, without waiting for others.

        Raises:
            ProtocolError: there is no snapshot, or the plan counts on a drift that
                this rank has not sent.
        """
        self._expect("begin", _Phase.TAKEN, _Phase.UNSENT, _Phase.SENT)
        if (plan.weight > 0.0) != self._counts:
            raise ProtocolError(
                f"window {plan.window}: this rank's drift weighs {plan.weight} in the "
                f"plan, it {'has' if self._counts else 'has not'} sent one"
            )
        if self._phase is _Phase.UNSENT:
            for group in self._groups:
                group.refill()
        if self._phase is not _Phase.SENT:
            self._send()
        self._buffers.begin(plan)
        self._phase, self._window = _Phase.BEGUN, plan.window

    @property
    def is_sent(self) -> bool:
        """True if a drift has been sent, and the plan has not come."""
        return self._phase is _Phase.SENT

    @property
    def is_begun(self) -> bool:
        """True if a reduction is under way."""
        return self._phase is _Phase.BEGUN

    def _send(self) -> None:
        for group in self._groups:
            group.begin()
        self._buffers.begin_known(is_active=self._counts)
        self._phase = _Phase.SENT

    def poll(self) -> bool:
        """True if :meth:`adopt` would not wait.

        Raises:
            ProtocolError: no reduction is under way.
        """
        self._expect("poll", _Phase.BEGUN)
        arrived = all(group.exchange.poll() for group in self._groups)
        return arrived and self._buffers.poll()

    @torch.no_grad()
    def adopt(self, plan: Reduce, *, drained: bool = False) -> SyncResult:
        """Takes the mean into the parameters, after waiting for it if need be.

        Args:
            plan: the reduction that was begun.
            drained: nothing was trained since the snapshot: the parameters become
                θ_{k+1} itself, equal to the bit on all such ranks.

        Returns:
            The snapshot's distance from the mean.

        Raises:
            ProtocolError: another reduction is under way, or none.
            CommunicationError: it failed; nothing has changed on this rank.
        """
        self._expect("adopt", _Phase.BEGUN)
        if plan.window != self._window:
            raise ProtocolError(
                f"expected to adopt window {self._window}, got {plan.window}"
            )
        self._wait()
        rule, consensus = OuterStep.of(plan), ConsensusSums()
        if not self._is_finite:
            consensus.distance = math.nan
        for group in self._groups:
            if drained or not self._is_finite:
                group.replace(rule, consensus)
            else:
                group.correct(rule, consensus)
        self._phase = _Phase.IDLE
        self._end(is_own=self._codec == "fp32" and rule.is_own(plan.weight))
        return consensus.result(plan.weight)

    def common(self) -> dict[int, torch.Tensor]:
        """θ_k and integer buffers, by the id of the model's tensor.

        On the host, in the precision of averaging; read-only.
        """
        held = self._buffers.common_counts()
        for group in self._groups:
            held.update(group.common())
        return held

    def _expect(self, call: str, *phases: _Phase) -> None:
        if self._phase not in phases:
            raise ProtocolError(
                f"{call}() came when {self._phase.value}; expected "
                + " or ".join(phase.value for phase in phases)
            )
