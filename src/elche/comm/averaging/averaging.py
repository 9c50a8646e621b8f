"""Parameter averaging at the end of a window.

This module has the base class, and the blocking averager. Each rank sends its weighted
drift from the common parameters θ_k, one message per dtype, and its changed buffers.
The sums are out of place: parameters, buffers and θ_k stay untouched until all sums
have arrived. So a failed reduction can be repeated (:meth:`Averager.connect`) or
replaced by another rank's result.

Cost: two model copies (θ_k, message), half of one for an outer momentum; for CUDA
parameters, one more on the host and one on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from elche.comm.averaging.averager_state import VERSION, blank, check_alike, misfit_of
from elche.comm.averaging.outer import ConsensusSums, OuterStep
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.averaging.window_sync import SyncResult, WindowSync
from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.tensors.flat import all_finite
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import ConfigError, ProtocolError

WHAT = "averaging parameters"
Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]
"""Returns the optimizers that step the model now; a loop may add some later."""


class Averager(WindowSync):
    """Parameters and buffers of one model, averaged over the group.

    A non-finite update is discarded: the gradients are dropped, and the optimizers are
    reset when this rank has adopted the result.

    Args:
        parameters: trainable parameters, each once.
        model: model whose buffers are averaged.
        optimizers: returns the optimizers that step the parameters locally.
        group: process group of all ranks.
        codec: encoding of messages; see :func:`open_coded_exchange`.
        momentum: momentum of the outer optimizer; None if it has none.
        own_factor: factor on the gradients of a batch, if the user weighs batches
            (weight 0 adds none) or losses are sums; else None.
        is_sum: losses are sums over a batch. A local batch's gradients are scaled by
            the number of local batches, so that a local step is as long as one
            device's.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        model: nn.Module,
        optimizers: Optimizers,
        group: Group,
        *,
        codec: str = "fp32",
        momentum: float | None = 0.5,
        own_factor: GradientFactor | None = None,
        is_sum: bool = False,
    ) -> None:
        self._own_factor, self._is_sum = own_factor, is_sum
        self.weighs_gradients = own_factor is not None
        self._was_finite, self._is_diverged = True, False
        self._weight = self._current = 0.0
        self._codec = codec
        self._momentum = momentum
        self._has_given_up = False
        self._parameters = list(parameters)
        self._optimizers = optimizers
        self._group = group
        self._groups: list[ParameterGroup] = []
        self._model = model
        self._buffers = WindowBuffers(model, group)

    @property
    @override
    def extra_bytes(self) -> int:
        """Host memory (bytes) in addition to the model, including outer momentum."""
        return sum(each.host_bytes(self._momentum) for each in self._groups)

    @property
    def is_finite(self) -> bool:
        """True if all parameters are finite; synchronizes the device."""
        return all_finite(self._parameters)

    @property
    def is_apart(self) -> bool:
        """True if the parameters differ from the common ones; synchronizes."""
        return any(group.has_moved for group in self._groups)

    @override
    def begin_batch(self, weight: float, parts: float = 1.0) -> None:
        self._current = weight
        if self._own_factor is not None:
            factor = parts if self._is_sum else 1.0
            self._own_factor.value = factor if weight > 0.0 else 0.0

    @override
    def batch_done(self) -> None:
        self._weight += self._current
        self._current = 0.0
        if self._own_factor is not None:
            self._own_factor.value = 1.0

    @override
    def detach(self) -> None:
        if self._own_factor is not None:
            self._own_factor.detach()

    def close(self, *, begins: bool) -> bool:
        """Ends the window; drops the gradients of a discarded update too."""
        self.has_moved = not self._is_diverged or self.is_apart
        self._was_finite = self._take(self._weight, begins=begins)
        self._weight = 0.0
        if not self._was_finite:
            for parameter in self._model.parameters():
                parameter.grad = None
        self._is_diverged = not (self._was_finite and self.has_moved)
        return self._was_finite

    @abstractmethod
    def _take(self, weight: float, *, begins: bool) -> bool:
        """Ends a window of this weight; True if all parameters are finite."""

    @torch.no_grad()
    def build(self) -> None:
        """Lays out messages and takes the parameters as common; a collective call."""
        self._groups = ParameterGroup.by_dtype(
            self._parameters, is_overlapped=self.is_overlapped
        )
        self._buffers.agree()
        self.connect(self._group)
        self.rebase()

    @torch.no_grad()
    def connect(self, group: Group) -> None:
        """Switches to a group; a collective call in it.

        θ_k, the parameters and their snapshot stay, so a reduction that failed in
        another group can be repeated in this one.
        """
        self._group = group
        for parameters in self._groups:
            parameters.connect(group, self._codec)
        self._buffers.connect(group)
        self._has_given_up = False

    @property
    def is_summed(self) -> bool:
        """True if all sums of parameters and buffers have arrived and are unread."""
        is_here = all(group.is_summed for group in self._groups)
        return is_here and self._buffers.is_summed

    @override
    def has_sum(self, plan: Reduce) -> bool:
        """True if all sums of the reduction have arrived; called when leaving a group.

        Once False, stays False until :meth:`connect`: missing sums are given up, since
        the other ranks may continue without them.
        """
        if not self._has_given_up:
            self._has_given_up = not self.is_summed
        return not self._has_given_up

    @torch.no_grad()
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """Copies a result to the ranks that lack it; collective, in a new group.

        Args:
            group: group of the survivors.
            source: place in it of a rank that holds the result.
            plan: plan of the reduction.
            lacks: True if this rank lacks the result and adopts it.
            keeps: True to keep this rank's steps since its part of the window ended.

        Raises:
            CommunicationError: another rank has died.
        """
        rule = OuterStep.of(plan)
        received = [
            each.receive(group, source, rule, lacks=lacks) for each in self._groups
        ]
        self._buffers.copy_result(group, source, plan, lacks=lacks)
        if lacks:  # only now, when everything has arrived
            for parameters, (base, momentum) in zip(
                self._groups, received, strict=True
            ):
                parameters.adopt_result(base, momentum, keeps=keeps)
            self._end(is_own=False)

    @override
    def reconnect(self, group: Group) -> None:
        """Calls :meth:`connect`, and merges local buffers, after ranks have changed."""
        self.connect(group)
        self._buffers.join_own()

    @override
    def retire(self) -> None:
        """Flushes sent messages before another averager uses the group.

        Raises:
            CommunicationError: a message could not be sent.
        """
        for parameters in self._groups:
            parameters.retire()

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the current values, equal on all ranks, as the common ones.

        Raises:
            ConfigError: a parameter's dtype or size has changed since :meth:`build`.
        """
        self._expect_rest("rebase")
        for group in self._groups:
            if group.becomes_another():
                self._refuse(
                    group.changed(),
                    ", which changes its messages; convert or resize a model before "
                    "elche.setup, or call elche.setup again",
                )
            group.rebase()
        self._buffers.rebase()

    def _expect_rest(self, call: str) -> None:
        """Refuses a call during a reduction, which only an overlapped one may be."""

    def _refuse_changed(self) -> None:
        """Refuses parameters that no longer fit their layout.

        They may have moved to other memory, as after ``p.data = ...``, since they are
        accessed in place.
        """
        do = "; convert, move or resize a model between epochs, on every rank"
        for group in self._groups:
            self._refuse(group.changed(), do)

    def _refuse(self, changed: torch.Tensor | None, do: str) -> None:
        """Refuses a parameter that no longer fits its layout, unless it is None."""
        if changed is None:
            return
        named = self._model.named_parameters()
        name = next((name for name, p in named if p is changed), "a parameter")
        dtype = str(changed.dtype).removeprefix("torch.")
        order = "" if changed.is_contiguous() else f" strides {list(changed.stride())}"
        raise ConfigError(
            f"the layout of {name} has changed since averaging began; it is now "
            f"{list(changed.shape)} {dtype}{order} on {changed.device}{do}"
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Copies a rank's committed state, without model and optimizer.

        For each group of parameters it has the outer momentum, this rank's codec
        residual, and the common parameters if the trained ones have less precision. It
        holds only tensors, numbers, strings, lists and None. It belongs to the current
        model: all ranks hold the common one, without steps since.

        Raises:
            ProtocolError: this rank's parameters are not the common ones.
        """
        self._expect_rest("state_dict")
        if self.is_apart:
            raise ProtocolError(
                "the parameters have changed since the last synchronisation; call "
                "state_dict() at the end of an epoch"
            )
        return {
            "version": VERSION,
            "groups": [group.state_dict() for group in self._groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Loads a saved state, each rank its own; a collective call.

        None is the state before the first reduction. Load the model first. A rank that
        did not exist at saving loads another rank's state with ``residual`` None;
        residuals from another world size or codec are converted
        (:meth:`CodedExchange.load_residual`).

        Raises:
            MismatchError: a rank's state does not fit its parameters, or ranks differ
                in common state; no rank has changed.
            ProtocolError: a reduction is in progress.
        """
        self._expect_rest("load_state_dict")
        layouts = [group.layout for group in self._groups]
        state = blank(layouts) if state is None else state
        problem = misfit_of(state, layouts)
        if not problem:
            for group, saved in zip(self._groups, state["groups"], strict=True):
                if not group.is_common(saved["base"]):
                    problem = "the model is not the saved one; load the model first"
        check_alike(self._group, state, problem)
        self.rebase()
        for group, saved in zip(self._groups, state["groups"], strict=True):
            group.load_state_dict(saved)

    @override
    def changed_buffers(self) -> tuple[int, ...]:
        """Returns indices of buffers written since they were last averaged."""
        return self._buffers.changed()

    def _wait(self) -> None:
        """Waits for all sums; parameters and buffers are still unchanged."""
        self._buffers.wait()
        for group in self._groups:
            group.exchange.wait(WHAT)

    @torch.no_grad()
    def finish(self, plan: Reduce, *, is_drained: bool = False) -> SyncResult:
        """Waits for all sums and adopts them.

        With overlap the parameters keep this rank's later steps, unless ``is_drained``.

        Raises:
            CommunicationError: a rank failed or timed out; nothing is changed then.
        """
        rule, consensus = OuterStep.of(plan), ConsensusSums()
        self._wait()
        keeps_steps = self.is_overlapped and not is_drained
        for group in self._groups:
            adopt = group.correct if keeps_steps else group.replace
            adopt(rule, consensus)
        self._end(is_own=self._codec == "fp32" and rule.is_own(plan.weight))
        return consensus.result(plan.weight)

    def _end(self, *, is_own: bool) -> None:
        """Ends a reduction; ``is_own``: its result equals this rank's parameters."""
        self._buffers.apply()
        for optimizer in () if is_own else self._optimizers():
            # LBFGS infers curvature from parameter changes; this jump is no step.
            if not self._was_finite or isinstance(optimizer, torch.optim.LBFGS):
                forget_state(optimizer)


class ParameterAverager(Averager):
    """Averages synchronously (``cadence``)."""

    def _take(self, weight: float, *, begins: bool) -> bool:
        return self.is_finite

    @torch.no_grad()
    def reduce(self, plan: Reduce) -> SyncResult:
        """Runs a reduction that leaves all ranks equal; a collective call.

        Raises:
            CommunicationError: the reduction failed; this rank is unchanged.
            ConfigError: a parameter has another shape, dtype or device than before.
        """
        self._refuse_changed()
        self._buffers.take()
        for group in self._groups:
            group.send(plan.weight)
        self._buffers.begin(plan)
        return self.finish(plan)


@torch.no_grad()
def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Resets an optimizer to the state before its first step.

    Adagrad creates its state in the constructor and cannot step without it, so its sums
    are reset to their initial values.
    """
    before = dict(optimizer.state)
    optimizer.state.clear()
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]  # Adagrad ignores groups'
    for parameter, state in before.items():
        if not state:  # of an added parameter group: created at its first step
            continue
        state["step"].zero_()
        state["sum"].fill_(complex(first, first) if parameter.is_complex() else first)
        optimizer.state[parameter] = state
