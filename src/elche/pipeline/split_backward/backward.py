"""Forward, input gradient, weight gradient and full backward of a stage.

The input gradient (I) is an ordinary backward through the stage's graph, in which the
weight gradients of matrix products are put off
(`elche.pipeline.split_backward.deferred`); the weight gradient (W) computes those. What
cannot be put off is done in I, so I and W together do the work of one full backward,
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from elche.comm.transport.messages import Message
from elche.errors import ConfigError, ProtocolError
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.split_backward.known_modules import KnownModules
from elche.pipeline.split_backward.weight_gradients import (
    Site,
    WeightGradients,
    differentiates_inside,
    hooks_made,
)
from elche.pipeline.stage import Deferring, Stage, can_split, changes_in_place
from elche.pipeline.trees import flatten, unflatten
from elche.torch_internals.passes import run_backward


@dataclass
class _Flight:
    """A microbatch between its forward and its last weight gradient."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    is_split: bool
    runs_again: bool = False
    sites: list[Site] = field(default_factory=list)
    hooks_before: object = None
    versions: dict[int, Any] = field(default_factory=dict)
    input_is_done: bool = False


@final
@dataclass(frozen=True)
class SplitProfile:
    """How much of the weight gradients' work was deferred.

    Attributes:
        deferred_flops: computed in W, or in the W part of a full backward.
        immediate_flops: computed with the input gradient. Estimated for parameters
            that autograd did: two operations per element and row of the stage's input.
    """

    deferred_flops: int
    immediate_flops: int

    @property
    def deferred_share(self) -> float:
        """Deferred over all; 0.0 where there is nothing."""
        total = self.deferred_flops + self.immediate_flops
        return self.deferred_flops / total if total else 0.0


@final
class StageBackward:
    """Runs a stage on microbatches.

    Args:
        stage: the stage.
        guard: checks the contributions; None to do without.
        splits: whether weight gradients may be deferred at all.
    """

    def __init__(
        self, stage: Stage, guard: ContributionGuard | None, splits: bool = True
    ) -> None:
        self.stage = stage
        self.guard = guard
        self.immediate_flops = 0
        self._store = WeightGradients()
        self._deferring = Deferring(stage, self._store)
        self._known = KnownModules(stage.split_modules)
        self._own = stage.own_backward
        self._splits = splits and self._own is None and can_split(stage)
        self._copies_input = changes_in_place(stage)
        self._flights: dict[int, _Flight] = {}

    @property
    def profile(self) -> SplitProfile:
        """Work on weight gradients since the beginning."""
        return SplitProfile(self._store.deferred_flops, self.immediate_flops)

    def begin_step(self) -> None:
        """Forgets what a failed step has left."""
        self._flights.clear()
        self._store.discard()
        if self.guard is not None:
            self.guard.begin_step()
        if self._splits:
            self._deferring.begin_step()
            self._known.begin_step()

    def end_step(self) -> None:
        """Checks that every microbatch is through.

        Raises:
            ProtocolError: the schedule left one in the middle.
            ContributionError: weight gradients were never computed.
        """
        if self.guard is not None:
            self.guard.end_step()
        if self._flights:
            raise ProtocolError(
                f"stage {self.stage.index}: the schedule never finished microbatches "
                f"{sorted(self._flights)}"
            )

    def forward(
        self,
        microbatch: int,
        given: Message,
        keywords: dict[str, Any],
        is_split: bool,
    ) -> Any:
        """Runs forward under autograd.

        Args:
            microbatch: which one.
            given: the input.
            keywords: for the layers.
            is_split: whether W will run apart from I.

        Returns:
            What the last layer returns, for :meth:`keep`.

        Raises:
            ConfigError: the stage changes its input in place unannounced.
        """
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(given.tensors, given.needs_grad, strict=True)
        ]
        flight = _Flight(inputs, [], is_split and self._splits)
        self._flights[microbatch] = flight
        if self._copies_input:
            inputs = [one.clone() if one.requires_grad else one for one in inputs]
        value = unflatten(given.structure, inputs)
        if self._own is not None:
            self._own.current_microbatch = microbatch
        try:
            if not flight.is_split:
                return self.stage.run(value, microbatch, keywords)
            return self._deferring_forward(flight, value, microbatch, keywords)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise ConfigError(
                f"a layer of stage {self.stage.index} changes the stage's input (or a "
                "parameter) in place, which autograd forbids; let its forward begin "
                "with x = x.clone(), give the module an attribute inplace = True, or "
                "cut the model elsewhere"
            ) from error

    def _deferring_forward(
        self, flight: _Flight, value: Any, microbatch: int, keywords: dict[str, Any]
    ) -> Any:
        store = self._store
        store.sites, store.runs_again = flight.sites, False
        flight.hooks_before = hooks_made()
        with self._deferring.installed(), self._known.installed():
            value = self.stage.run(value, microbatch, keywords)
        flight.runs_again = store.runs_again
        for site in flight.sites:
            if site.grads:
                raise differentiates_inside()
        return value

    def keep(self, microbatch: int, value: Any) -> Message:
        """Keeps a forward's outputs for backward; returns the message to pass on.

        Raises:
            ConfigError: there is no tensor among them.
        """
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
        """Computes the gradients of the inputs; see the module.

        Args:
            microbatch: which one.
            gradients: one per output that requires a gradient; None counts as zero.

        Returns:
            One per input that requires a gradient; None for zero.

        Raises:
            ContributionError: a parameter's gradient is lost.
        """
        flight = self._flight(microbatch)
        if flight.input_is_done:
            raise ProtocolError(
                f"stage {self.stage.index}: microbatch {microbatch} had its backward"
            )
        flight.input_is_done = True
        if self._own is not None:
            if self.guard is not None:
                flight.versions = self.guard.versions()
            return list(self._own.backward_input(microbatch, tuple(gradients)))
        self._autograd(microbatch, flight, gradients)
        for site in flight.sites:
            site.node = None  # what waits keeps no graph alive
        found = [one.grad for one in flight.inputs if one.requires_grad]
        flight.inputs, flight.outputs, flight.sites = [], [], []
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Computes the weight gradients that were put off.

        Raises:
            ContributionError: a parameter's gradient is lost.
        """
        flight = self._flight(microbatch)
        if not flight.input_is_done:
            raise ProtocolError(
                f"stage {self.stage.index}: the weight gradient of microbatch "
                f"{microbatch} before its input gradient"
            )
        del self._flights[microbatch]
        if self._own is not None:
            self._own.backward_weight(microbatch)
            if self.guard is not None:
                self.guard.after_own(microbatch, flight.versions)
        elif self.guard is None:
            self._store.compute(microbatch)
        else:
            with self.guard.watch() as seen:
                touched = self._store.compute(microbatch)
            self.guard.after_weight(microbatch, seen, touched)

    def full_backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Both at once; see :meth:`backward_input`."""
        found = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return found

    def _flight(self, microbatch: int) -> _Flight:
        flight = self._flights.get(microbatch)
        if flight is None:
            raise ProtocolError(
                f"stage {self.stage.index}: backward of microbatch {microbatch}, "
                "which has no forward, or has been through already"
            )
        return flight

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
        if self.guard is None:
            self._run_backward(microbatch, flight, pairs)
            return
        roots = [output.grad_fn for output, _ in pairs]
        with self.guard.watch() as seen:
            self._run_backward(microbatch, flight, pairs)
        waiting = self._store.waiting_for(microbatch)
        self._count_immediate(flight, self.guard.elements(seen))
        self.guard.after_backward(microbatch, seen, roots, flight.sites, waiting)

    def _run_backward(
        self,
        microbatch: int,
        flight: _Flight,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        if not pairs:
            return
        outputs, gradients = zip(*pairs, strict=True)
        if not flight.is_split:
            _differentiate(outputs, gradients)
            return
        self._store.open(microbatch, flight.sites, flight.hooks_before)
        try:
            if flight.runs_again:
                # Checkpointed parts must see the same weights as in forward.
                with self._deferring.installed(), self._known.installed():
                    _differentiate(outputs, gradients)
            else:
                _differentiate(outputs, gradients)
            self._store.keep(flight.sites)
        finally:
            self._store.close()

    def _count_immediate(self, flight: _Flight, elements: int) -> None:
        first = next(iter(flight.inputs), None)
        if flight.is_split and first is not None and first.dim():
            width = first.shape[-1] if first.is_floating_point() else 1
            self.immediate_flops += 2 * (first.numel() // width) * elements


def _differentiate(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """``torch.autograd.backward`` with one check of its many in Python.

    Together they take as long as a small product (Megatron-LM goes past them, too).
    """
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.shape != gradient.shape:
            raise ProtocolError(
                f"a gradient of shape {list(gradient.shape)} came for an output of "
                f"shape {list(output.shape)}; expected the same"
            )
    run_backward(
        outputs,
        gradients,
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
