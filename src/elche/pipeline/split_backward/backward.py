"""Forward, input gradient and weight gradient of a stage.

The input gradient (I) is an ordinary backward through the stage's graph, except that
known modules of torch defer their weight gradients
(`elche.pipeline.split_backward.split_modules`). The weight gradient (W) computes the
deferred gradients. Gradients that cannot be deferred are computed in I. Together I and
W do the work of one full backward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from elche.comm.transport.messages import Message
from elche.errors import ConfigError
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.split_backward.split_modules import SplitModules
from elche.pipeline.split_backward.weight_gradients import WeightGradients
from elche.pipeline.stage import Stage
from elche.pipeline.trees import flatten, unflatten
from elche.runtime.emulation import (
    FORWARD_FRACTION,
    EmulationConfig,
    num_samples,
    sleep_until,
)


@dataclass
class _Flight:
    """A microbatch's state between its forward and its last weight gradient."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    is_split: bool
    emulated_s: float = 0.0
    weight_s: float = 0.0


@final
class StageBackward:
    """Runs a stage on microbatches.

    The schedule gives the order of actions; `check_schedule` has verified it.

    Args:
        stage: the stage.
        guard: checks the gradient contributions; None disables the check.
        splits: whether weight gradients may be deferred.
        emulation: speed of an emulated device, per layer; None for a real device.
    """

    def __init__(
        self,
        stage: Stage,
        guard: ContributionGuard | None,
        splits: bool = True,
        emulation: EmulationConfig | None = None,
    ) -> None:
        self.stage, self._emulation = stage, emulation
        self.guard = guard
        self._store = WeightGradients()
        self._modules = SplitModules(stage.split_modules, self._store)
        self._own = stage.own_backward
        self._splits = splits and self._own is None
        # A layer may change its input in place, such as nn.ReLU(inplace=True).
        modules = (m for layer in stage.layers for m in layer.module.modules())
        self._copies_input = any(getattr(m, "inplace", False) is True for m in modules)
        self._flights: dict[int, _Flight] = {}

    @property
    def deferred(self) -> int:
        """Number of weight gradients deferred so far."""
        return self._store.computed

    def unsplit(self) -> list[str]:
        """Names and types of the modules whose weight gradients are not deferred."""
        if not self._splits:
            return []
        self._modules.begin_step()
        return self._modules.unsplit(self.stage.named_modules())

    def begin_step(self) -> None:
        """Resets the state, including that of a failed step."""
        self._flights.clear()
        self._store.discard()
        if self.guard is not None:
            self.guard.begin_step()
        if self._splits:
            self._modules.begin_step()

    def end_step(self) -> None:
        """Checks that no weight gradient is pending.

        Raises:
            ContributionError: weight gradients were never computed.
        """
        if self.guard is not None:
            self.guard.end_step()

    def forward(
        self,
        microbatch: int,
        given: Message,
        keywords: dict[str, Any],
        is_split: bool,
    ) -> Any:
        """Runs forward under autograd.

        Returns:
            Output of the last layer, for :meth:`keep`.
        """
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(given.tensors, given.needs_grad, strict=True)
        ]
        begin_s, emulated_s = time.perf_counter(), self._emulated_s(given)
        flight = _Flight(inputs, [], is_split and self._splits, emulated_s)
        self._flights[microbatch] = flight
        if self._copies_input:
            inputs = [one.clone() if one.requires_grad else one for one in inputs]
        value = unflatten(given.structure, inputs)
        if self._own is not None:
            self._own.current_microbatch = microbatch
        try:
            with self._deferring(flight):
                found = self.stage.run(value, microbatch, keywords)
            sleep_until(begin_s + FORWARD_FRACTION * emulated_s)
            return found
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise ConfigError(
                f"a layer of stage {self.stage.index} changes the stage's input (or a "
                "parameter) in place, which autograd forbids; let its forward begin "
                "with x = x.clone(), give the module an attribute inplace = True, or "
                "cut the model elsewhere"
            ) from error

    def keep(self, microbatch: int, value: Any) -> Message:
        """Keeps a forward's outputs for backward; returns them as a message."""
        where = f"the output of stage {self.stage.index}"
        tensors, structure = flatten(value, where)
        if not tensors:
            raise ConfigError(
                f"{where} holds no tensor; expected at least one to pass on, got "
                f"{type(value).__name__}"
            )
        needs_grad = tuple(tensor.requires_grad for tensor in tensors)
        self._flights[microbatch].outputs = [t for t in tensors if t.requires_grad]
        return Message(tuple(t.detach() for t in tensors), structure, needs_grad)

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Computes the gradients of the inputs (I), and those that cannot be deferred.

        Args:
            microbatch: index of the microbatch.
            gradients: one gradient per output that requires one; None counts as zero.

        Returns:
            One gradient per input that requires one; None for zero.

        Raises:
            ContributionError: a parameter's gradient is lost.
        """
        flight, begin_s = self._flights[microbatch], time.perf_counter()
        if self._own is not None:
            found = list(self._own.backward_input(microbatch, tuple(gradients)))
            if self.guard is not None:
                self.guard.after_own_input(microbatch)
        else:
            self._autograd(microbatch, flight, gradients)
            found = [one.grad for one in flight.inputs if one.requires_grad]
            flight.inputs, flight.outputs = [], []
        if flight.emulated_s:  # without deferred gradients the whole B runs here
            defers = self._own is not None or self._store.waiting_for(microbatch)
            share = len(self.stage.split_modules) / len(self.stage.layers)
            backward_s = (1 - FORWARD_FRACTION) * flight.emulated_s
            flight.weight_s = backward_s / 2 * share if defers else 0.0
            sleep_until(begin_s + backward_s - flight.weight_s)
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Computes the deferred weight gradients of a microbatch.

        Raises:
            ContributionError: a parameter's gradient is lost.
        """
        end_s = time.perf_counter() + self._flights.pop(microbatch).weight_s
        if self._own is not None:
            self._own.backward_weight(microbatch)
        else:
            self._store.compute(microbatch)
        sleep_until(end_s)
        if self.guard is not None:
            self.guard.after_weight(microbatch)

    def _emulated_s(self, given: Message) -> float:
        """Time (s) of forward and backward on an emulated device; 0 on a real one."""
        if self._emulation is None:
            return 0.0
        pairs = zip(given.tensors, given.needs_grad, strict=True)
        learning = [tensor for tensor, needed in pairs if needed]
        samples = num_samples(learning or given.tensors, {})
        return len(self.stage.layers) * self._emulation.pass_s(samples)

    def _autograd(
        self,
        microbatch: int,
        flight: _Flight,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        pairs = [
            (output, gradient)
            for output, gradient in zip(flight.outputs, gradients, strict=True)
            if gradient is not None
        ]
        if self.guard is not None:
            self.guard.begin_backward()
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            if flight.is_split:
                self._store.open(microbatch)
            try:
                with self._deferring(flight):  # activation checkpointing reruns forward
                    torch.autograd.backward(outputs, given)
            finally:
                self._store.close()
        if self.guard is not None:
            roots = [output.grad_fn for output, _ in pairs]
            waiting = self._store.waiting_for(microbatch)
            self.guard.after_backward(microbatch, roots, waiting)

    def _deferring(self, flight: _Flight) -> contextlib.AbstractContextManager[None]:
        """Context in which modules defer the weight gradients of a microbatch."""
        if flight.is_split:
            return self._modules.installed()
        return contextlib.nullcontext()
