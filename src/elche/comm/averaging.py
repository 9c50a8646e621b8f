"""Parameter averaging at the end of a window.

Here is what every form of it shares, and the form that waits. Each rank sends its
weighted drift from the common parameters θ_k, one message per dtype, and with it what
changed of the buffers and, if asked, its optimizer's state. The sums are out of place:
until all of them are there, this rank's parameters, state and buffers and θ_k are
untouched, so a reduction that fails can be redone (:meth:`Averager.connect`) or
replaced by another rank's result.

Cost: two model copies (θ_k and the message), one more for an outer momentum, one per
averaged state tensor; from a CUDA device one more here and one there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elche.comm.optimizer_state import OptimizerStateAverager
from elche.comm.outer import OuterStep
from elche.comm.parameter_group import ParameterGroup, Spread, SyncResult
from elche.comm.process_group import Group
from elche.comm.window_buffers import WindowBuffers
from elche.coordination.messages import Reduce

WHAT = "averaging parameters"


class Averager:
    """Parameters and buffers of one model, averaged over the group.

    Args:
        parameters: the trainable parameters, each once.
        model: the model, for its buffers.
        optimizer: the optimizer that steps the parameters locally.
        group: the process group.
        reset_state: forget the optimizer's state at every synchronisation.
        codec: how parameters travel; see :func:`open_coded_exchange`.
    """

    is_overlapped = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        reset_state: bool = False,
        codec: str = "fp32",
    ) -> None:
        self._codec = codec
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._group = group
        self._reset_state = reset_state
        self._groups: list[ParameterGroup] = []
        self._buffers = WindowBuffers(model, group)
        self._state = OptimizerStateAverager(self._parameters, optimizer, group)

    @property
    def extra_bytes(self) -> int:
        """Host memory beside the model, an outer momentum included."""
        held = sum(group.host_bytes for group in self._groups)
        return held + self._state.host_bytes

    @torch.no_grad()
    def build(self) -> None:
        """Takes the present parameters as the common ones; with all ranks."""
        self._groups = ParameterGroup.by_dtype(
            self._parameters, is_overlapped=self.is_overlapped, codec=self._codec
        )
        self.connect(self._group)
        self.rebase()

    @torch.no_grad()
    def connect(self, group: Group) -> None:
        """Sends through this group from now on; with all its ranks.

        θ_k, the parameters and what was taken of them stay, so a reduction that failed
        in another group can be redone in this one.
        """
        self._group = group
        for parameters in self._groups:
            parameters.connect(group)
        self._buffers.connect(group)
        self._state.connect(group)

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common: ranks are known to be equal now."""
        for group in self._groups:
            group.rebase()
        self._buffers.rebase()

    def state_layout(self) -> str:
        """Names what of the optimizer's state can be averaged; "" if it has none yet.

        Ranks average state only when all of them name the same layout.
        """
        return self._state.layout()

    def changed_buffers(self) -> tuple[int, ...]:
        """Indices of buffers that were written since they were last averaged."""
        return self._buffers.changed()

    def _wait(self) -> None:
        """Waits for all that was begun; nothing has been written before."""
        for group in self._groups:
            group.exchange.wait(WHAT)
        self._state.wait()
        self._buffers.wait()

    def _end(self, spread: Spread, weight: float) -> SyncResult:
        """What remains when parameters and state are written."""
        self._buffers.apply()
        if self._reset_state:
            self._optimizer.state.clear()
        return spread.result(weight)


class ParameterAverager(Averager):
    """Averages at once, and waits for it (``cadence``)."""

    @torch.no_grad()
    def synchronise(self, plan: Reduce) -> SyncResult:
        """Carries out a reduction with all ranks; afterwards all hold the same.

        Raises:
            CommunicationError: it failed; nothing has changed on this rank.
        """
        rule, spread = OuterStep.of(plan), Spread()
        self._buffers.take()
        for group in self._groups:
            group.send(plan.weight)
        if plan.include_state:
            self._state.begin(plan.weight)
        self._buffers.begin(plan)
        self._wait()
        for group in self._groups:
            group.replace(rule, spread)
        self._state.apply()
        return self._end(spread, plan.weight)
