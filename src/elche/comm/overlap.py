"""Parameter averaging that goes on while the next window is trained.

At a window's end the rank copies its parameters θ_r (:meth:`OverlappedAverager.
snapshot`) and trains on. Its drift θ_k − θ_r is summed over the ranks meanwhile. When
the mean is there, θ_{k+1} − θ_r is added to what the parameters hold by then, so steps
taken meanwhile are kept; θ_{k+1} is what the next drift is measured from, so no
contribution is lost or counted twice. One reduction is in flight at a time. (CO2,
arXiv:2401.16265, and Streaming DiLoCo, arXiv:2501.18512, hide the outer reduction too;
they replace or blend parameters where this adds a correction.)

Cost: three model copies (θ_k, θ_r and the message), one more for an outer momentum.
Optimizer state stays local, or is reset when a mean is adopted.

A message in shared memory has one side. That suffices, because a rank writes the next
one only when all ranks have closed the next window, and they close it only after they
have adopted this one; the exchange checks it.
"""

from __future__ import annotations

from enum import Enum

import torch

from elche.comm.averaging import Averager
from elche.comm.outer import OuterStep
from elche.comm.parameter_group import Spread, SyncResult
from elche.comm.process_group import Group
from elche.coordination.messages import Reduce
from elche.errors import ProtocolError


class _Phase(Enum):
    """Where the one reduction is."""

    IDLE = "nothing has been taken"
    TAKEN = "a snapshot has been taken"
    BEGUN = "a reduction is under way"


class OverlappedAverager(Averager):
    """Averages while training goes on (``async``).

    The order of calls is :meth:`snapshot`, :meth:`begin`, any number of :meth:`poll`,
    :meth:`adopt`. A reduction that failed may be begun again after :meth:`connect`.
    """

    is_overlapped = True
    _phase = _Phase.IDLE
    _window = -1
    _is_finite = True

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common; what was taken is forgotten.

        Raises:
            ProtocolError: a reduction is under way.
        """
        self._expect("rebase", _Phase.IDLE, _Phase.TAKEN)
        super().rebase()
        self._phase = _Phase.IDLE

    @torch.no_grad()
    def connect(self, group: Group) -> None:
        """See :meth:`Averager.connect`; what was under way may be begun again."""
        super().connect(group)
        if self._phase is _Phase.BEGUN:
            self._phase = _Phase.TAKEN

    @torch.no_grad()
    def snapshot(self) -> bool:
        """Remembers parameters and buffers as they are at the window's end.

        Returns:
            Whether all parameters are finite, as far as that is known without waiting:
            on a CUDA device the answer is True.

        Raises:
            ProtocolError: the last reduction has not been adopted.
        """
        self._expect("snapshot", _Phase.IDLE, _Phase.TAKEN)
        self._is_finite = all([group.take() for group in self._groups])
        self._buffers.take()
        self._phase = _Phase.TAKEN
        return self._is_finite

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """Begins the reduction of the snapshot, without waiting for other ranks.

        Raises:
            ProtocolError: there is no snapshot, or the plan asks for optimizer state.
        """
        self._expect("begin", _Phase.TAKEN)
        if plan.include_state:
            raise ProtocolError(
                f"window {plan.window}: optimizer state cannot be averaged while "
                "training goes on; expected include_state=False"
            )
        OuterStep.of(plan)
        sent = [group.send(plan.weight) for group in self._groups]
        self._is_finite = self._is_finite and all(sent)
        self._buffers.begin(plan)
        self._phase, self._window = _Phase.BEGUN, plan.window

    def poll(self) -> bool:
        """Whether :meth:`adopt` would not wait.

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
        rule, spread = OuterStep.of(plan), Spread()
        for group in self._groups:
            if drained or not self._is_finite:
                group.replace(rule, spread)
            else:
                group.correct(rule, spread)
        self._phase = _Phase.IDLE
        return self._end(spread, plan.weight)

    def _expect(self, call: str, *phases: _Phase) -> None:
        if self._phase not in phases:
            raise ProtocolError(
                f"{call}() came when {self._phase.value}; expected "
                + " or ".join(phase.value for phase in phases)
            )
