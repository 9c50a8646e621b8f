"""Parameter averaging at the end of a window.

Here is what every form of it shares, and the form that waits. Each rank sends its
weighted drift from the common parameters θ_k, one message per dtype, and with it what
changed of the buffers. The sums are out of place: until all of them are there, this
rank's parameters and buffers and θ_k are untouched, so a reduction that fails can be
redone (:meth:`Averager.connect`) or replaced by another rank's result.

Cost: two model copies (θ_k and the message), one more for an outer momentum; from a
CUDA device one more here and one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.averaging.averager_state import VERSION, blank, check_alike, misfit_of
from elche.comm.averaging.consensus_distance import ConsensusSums, SyncResult
from elche.comm.averaging.optimizer_state import Optimizers, forget_state
from elche.comm.averaging.outer import OuterStep
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.tensors.nan_check import all_finite
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import ConfigError, ProtocolError

WHAT = "averaging parameters"


class Averager:
    """Parameters and buffers of one model, averaged over the group.

    Args:
        parameters: the trainable parameters, each once.
        model: the model, for its buffers.
        optimizers: those that step the parameters locally.
        group: the process group.
        codec: encoding of messages; see :func:`open_coded_exchange`.
        has_momentum: the outer optimizer is expected to have one.
    """

    is_overlapped = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        model: nn.Module,
        optimizers: Optimizers,
        group: Group,
        *,
        codec: str = "fp32",
        has_momentum: bool = True,
    ) -> None:
        self._codec = codec
        self._has_momentum = has_momentum
        self._has_given_up = False
        self._parameters = list(parameters)
        self._optimizers = optimizers
        self._group = group
        self._groups: list[ParameterGroup] = []
        self._model = model
        self._buffers = WindowBuffers(model, group)

    @property
    def extra_bytes(self) -> int:
        """Host memory beside the model, an outer momentum included."""
        return sum(group.host_bytes for group in self._groups)

    @property
    def is_finite(self) -> bool:
        """True if all parameters are numbers; waits for them."""
        return all_finite(self._parameters)

    @property
    def has_moved(self) -> bool:
        """True if the parameters are no longer the common ones; waits for them."""
        return any(group.has_moved for group in self._groups)

    @torch.no_grad()
    def build(self) -> None:
        """Takes the present parameters as the common ones; with all ranks."""
        self._groups = ParameterGroup.by_dtype(
            self._parameters,
            is_overlapped=self.is_overlapped,
            has_momentum=self._has_momentum,
        )
        self._buffers.agree()
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
            parameters.connect(group, self._codec)
        self._buffers.connect(group)
        self._has_given_up = False

    @property
    def is_summed(self) -> bool:
        """True if the sums of parameters and buffers are here, and none is taken."""
        is_here = all(group.is_summed for group in self._groups)
        return is_here and self._buffers.is_summed

    def has_sum(self, plan: Reduce) -> bool:
        """True if all sums of a reduction that was begun are here.

        The group is about to be left. Sums that are missing now will not arrive, since
        the others may continue without them.
        """
        if not self._has_given_up:
            self._has_given_up = not self.is_summed
        return not self._has_given_up

    @torch.no_grad()
    def hand_over(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """Copies a result to the ranks that lack it; collective, in a new group.

        Args:
            group: the new group.
            source: place in it of a rank that holds the result.
            plan: of the reduction.
            lacks: this rank does not hold it; afterwards it does.
            keeps: what it has trained since its part ended stays.

        Raises:
            CommunicationError: another rank has died.
        """
        rule = OuterStep.of(plan)
        received = [
            each.receive(group, source, rule, lacks=lacks) for each in self._groups
        ]
        self._buffers.hand_over(group, source, plan, lacks=lacks)
        if lacks:  # all is here: it is taken as a whole
            for parameters, (base, momentum) in zip(
                self._groups, received, strict=True
            ):
                parameters.take_over(base, momentum, keeps=keeps)
            self._end(is_own=False)

    def reconnect(self, group: Group) -> None:
        """Connects as :meth:`connect`, after a group with other ranks."""
        self.connect(group)
        self._buffers.join_own()

    def retire(self) -> None:
        """Flushes sent messages: another averager takes its place in the group.

        Raises:
            CommunicationError: it has not left, and will not.
        """
        for parameters in self._groups:
            parameters.retire()

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common: ranks are known to be equal now.

        Raises:
            ConfigError: a parameter has another dtype or size than when it was built.
        """
        for group in self._groups:
            if group.becomes_another():
                changed = group.changed()
                assert changed is not None
                raise ConfigError(
                    f"{self._described(changed)}, which is another message; convert "
                    "or resize a model before elche.setup, or call that again"
                )
            group.rebase()
        self._buffers.rebase()

    def _refuse_changed(self) -> None:
        """Refuses parameters that cannot be read and written as they were laid out.

        They may point to other memory, as after ``p.data = ...``: parameters are read
        and written where they are.

        Raises:
            ConfigError: names one that has changed.
        """
        for group in self._groups:
            changed = group.changed()
            if changed is not None:
                raise ConfigError(
                    f"{self._described(changed)}; convert, move or resize a model "
                    "between epochs, on every rank"
                )

    def _described(self, changed: torch.Tensor) -> str:
        named = self._model.named_parameters()
        name = next((name for name, p in named if p is changed), "a parameter")
        dtype = str(changed.dtype).removeprefix("torch.")
        order = "" if changed.is_contiguous() else f" strides {list(changed.stride())}"
        return (
            f"{name} was laid out otherwise when averaging began and is "
            f"{list(changed.shape)} {dtype}{order} on {changed.device} now"
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Copies of a rank's committed state beside model and optimizer.

        Of each group of parameters the outer momentum, this rank's residual of a codec,
        and the common parameters where those trained are of less precision. Only
        tensors, numbers, strings, lists and None. It belongs to the model as it is now:
        all ranks hold the common one, and have taken no step since.

        Raises:
            ProtocolError: this rank's parameters are not the common ones.
        """
        if self.has_moved:
            raise ProtocolError(
                "the parameters have moved since the last synchronisation; expected "
                "state_dict() at a drained one, where an epoch ends"
            )
        return {
            "version": VERSION,
            "groups": [group.state_dict() for group in self._groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on from a saved state; with all ranks, each with its own.

        None is the state of a run in which nothing was averaged yet.

        The model is to hold what it held then. Ranks that were not there take a state
        of another one with ``residual`` None; one of another world size or codec is
        carried over (:meth:`CodedExchange.load_residual`).

        Raises:
            MismatchError: a rank's state does not fit its parameters, or ranks differ
                in what must be equal; nothing has changed on any of them.
            ProtocolError: a reduction is under way.
        """
        layouts = [group.layout for group in self._groups]
        state = blank(layouts) if state is None else state
        problem = misfit_of(state, layouts)
        if not problem:
            for group, saved in zip(self._groups, state["groups"], strict=True):
                if not group.is_common(saved["base"]):
                    problem = "the model does not hold what it held then; load it first"
        check_alike(self._group, state, problem)
        self.rebase()
        for group, saved in zip(self._groups, state["groups"], strict=True):
            group.load_state_dict(saved)

    def changed_buffers(self) -> tuple[int, ...]:
        """Indices of buffers that were written since they were last averaged."""
        return self._buffers.changed()

    def _wait(self) -> None:
        """Waits for all that was begun; nothing has been written before."""
        self._buffers.wait()
        for group in self._groups:
            group.exchange.wait(WHAT)

    def _end(self, *, is_own: bool) -> None:
        """Ends a reduction; ``is_own``: its result is what this rank holds."""
        self._buffers.apply()
        for optimizer in () if is_own else self._optimizers():
            # It reads curvature from how far parameters moved: a jump is no step.
            if isinstance(optimizer, torch.optim.LBFGS):
                forget_state(optimizer)


class ParameterAverager(Averager):
    """Averages at once, and waits for it (``cadence``)."""

    @torch.no_grad()
    def synchronise(self, plan: Reduce) -> SyncResult:
        """Carries out a reduction with all ranks; afterwards all hold the same.

        Raises:
            CommunicationError: it failed; nothing has changed on this rank.
            ConfigError: a parameter has another shape, dtype or device than before.
        """
        self._refuse_changed()
        self._buffers.take()
        for group in self._groups:
            group.send(plan.weight)
        self._buffers.begin(plan)
        return self.complete(plan)

    @torch.no_grad()
    def complete(self, plan: Reduce) -> SyncResult:
        """The second half of :meth:`synchronise`: waits, and takes the sums."""
        rule, consensus = OuterStep.of(plan), ConsensusSums()
        self._wait()
        for group in self._groups:
            group.replace(rule, consensus)
        self._end(is_own=self._codec == "fp32" and rule.is_own(plan.weight))
        return consensus.result(plan.weight)
