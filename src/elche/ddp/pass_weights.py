"""Weights of the backward passes whose gradients ``p.grad`` holds.

A pass under ``no_sync()`` accumulates its gradients locally. If all passes of a rank
have the same weight, the gradients stay unscaled. Otherwise each pass's gradients are
multiplied by its weight over the first pass's weight before they are added; the
reduction applies the common factor. So k passes give k times the mean over the union of
their batches, as k equal passes do under torch's wrapper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from elche.comm.gradients.gradient_factor import (
    Gradients,
    accumulation_nodes,
    hook_accumulation,
    scaled,
)
from elche.comm.tensors.nested import items_of, tensors_in
from elche.errors import ConfigError
from elche.torch_internals.held import version
from elche.torch_internals.passes import graph_task_id, queue_callback

OUTSIDE = -1


@dataclass(slots=True)
class _Pass:
    """A backward pass in progress.

    Attributes:
        given: weight set by `set_weight`; None: the number of samples.
        counted: total samples of its forward passes.
        forwards: forward passes that it runs through.
        reduces: True if one of its forward passes was outside of ``no_sync()``.
        has_gradients: True once a parameter has received a gradient.
        is_closed: True once its reduction has begun.
        is_weighed: True once its gradients were scaled relative to earlier passes.
        before: weights of the earlier passes, set at closing.
    """

    given: float | None
    counted: float = 0.0
    forwards: list[_Forward] = field(default_factory=list)
    reduces: bool = False
    has_gradients: bool = False
    is_closed: bool = False
    is_weighed: bool = False
    before: Sequence[float] = ()

    @property
    def weight(self) -> float:
        return self.counted if self.given is None else self.given


@dataclass(slots=True)
class _Forward:
    """A forward pass.

    Attributes:
        samples: its batch size, used as weight unless `set_weight` overrides it.
        reduces: True if its gradients are reduced, not only accumulated.
        counted_in: ID of the last backward pass that counted it.
    """

    samples: float
    reduces: bool
    counted_in: int = OUTSIDE


@final
class PassWeights:
    """Accumulates this rank's weight for the next reduction.

    Args:
        parameters: all reduced parameters.
        is_mean: True if losses are means; gradients of sum losses are not scaled.

    Attributes:
        given: weight set for the next backward pass; None: the number of samples.
        expected: the last forward pass, if its backward pass has not begun.
        current: the backward pass in progress, or None if it runs past the wrapper.
        sent: pass whose reduction is in progress and may still lack gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_mean: bool) -> None:
        self._parameters = parameters
        self._is_mean = is_mean
        self.given: float | None = None
        self.expected: _Forward | None = None
        self.current: _Pass | None = None
        self._ended: _Pass | None = None
        self._passes: list[_Pass] = []
        self.sent: _Pass | None = None
        self._left: list[tuple[nn.Parameter, tuple[int, Any]]] = []
        self._holds_sum = False
        self._nodes: list[Any] = []

    def expect(
        self,
        weight: float,
        outputs: Iterable[torch.Tensor],
        begin: Callable[[], None] | None,
    ) -> None:
        """Records a finished forward pass and hooks its outputs.

        Args:
            weight: number of its samples, added to its backward pass's weight.
            outputs: tensors through which its backward pass enters the model.
            begin: called when a backward pass reaches the outputs; None: gradients are
                only accumulated.
        """
        if begin is None and not self._nodes:  # not those of autograd.grad
            self._nodes = accumulation_nodes(self._parameters)
            hook_accumulation(self._nodes, self._weighed)
        if graph_task_id() == OUTSIDE:
            self.current = None  # left by an aborted backward pass
        self.expected = forward = _Forward(weight, begin is not None)

        def count(gradient: torch.Tensor) -> None:
            if self._enter(forward) and begin is not None:
                begin()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(count)

    def is_local(self) -> bool:
        """True if the current backward pass only accumulates gradients.

        torch reduces such a pass if an earlier forward pass outside of ``no_sync()``
        had no backward pass.
        """
        current = self._note_gradient()
        return current is not None and not current.reduces

    def close(self, *, is_joining: bool) -> tuple[float, float]:
        """Closes the accumulated passes at the start of a reduction.

        Args:
            is_joining: True outside of a backward pass: only accumulated gradients are
                reduced.

        Returns:
            This rank's weight, and the factor of its gradients.

        Raises:
            ConfigError: weights were set for some passes and counted for others.
        """
        if is_joining:
            self.given = None
            self._forget_dropped()
        else:
            current = self._note_gradient()
            if current is not None:
                current.before = [each.weight for each in self._passes]
                self._add(current)
                current.is_closed = True
                self.sent = current
            if self._is_mean:
                self._refuse_uneven()
            if graph_task_id() == OUTSIDE:
                self.current = None
        weights = [each.weight for each in self._passes]
        first = next((weight for weight in weights if weight), 0.0)
        self._passes.clear()
        self._left.clear()
        if not self._is_mean:
            return sum(weights), float(first > 0.0)
        return sum(weights), first * len(weights)

    def _refuse_uneven(self) -> None:
        """Refuses uneven weights if forward passes had different backward counts.

        Two backward passes of one forward pass would count its samples twice.
        """
        passes = self._passes
        times = Counter(id(forward) for each in passes for forward in each.forwards)
        if len(set(times.values())) > 1 and len({each.weight for each in passes}) > 1:
            passes.clear()
            raise ConfigError(
                "forward passes of different weights under no_sync() had different "
                "numbers of backward passes; run one backward for each forward pass"
            )

    def _note_gradient(self) -> _Pass | None:
        """Records a gradient for the current pass; returns the pass, if there is one.

        With a static graph the first reduction begins after its pass has ended.
        """
        if self.current is None:
            if self.expected is not None:  # the loss bypasses the outputs
                self._enter(self.expected)
            elif self.sent is not None:  # so do its missing gradients
                self.current = self.sent
                queue_callback(self._end)
            elif self._ended is not None:
                self.current, self._ended = self._ended, None
                self.given = None if self.current.given is not None else self.given
        if self.current is not None:
            self.current.has_gradients = True
        return self.current

    def _enter(self, forward: _Forward) -> bool:
        """Counts a forward pass once per backward pass that reaches its outputs.

        Returns:
            True if it is the first forward pass of this backward pass.
        """
        task = graph_task_id()
        if forward.counted_in == task != OUTSIDE:
            return False
        forward.counted_in = task
        self.expected, self._ended = None, None
        is_new = self.current is None
        if self.current is None and self.sent is not None:
            self._refuse_uncounted(self.sent, forward)
            self.current, self.given = self.sent, None
            queue_callback(self._end)
        elif self.current is None:
            self._forget_dropped()
            if not self._passes and (self._nodes or not self._is_mean):
                self._holds_sum = any(map(_is_something, self._parameters))
            if self._holds_sum and not self._is_mean:
                raise ConfigError(
                    "loss_reduction='sum' cannot add to gradients that were already "
                    "summed over the ranks; put all backwards of a step but the last "
                    "into no_sync(), and call zero_grad() after the step"
                )
            self.current, self.given = _Pass(self.given), None
            if task != OUTSIDE:
                queue_callback(self._end)
        is_another = all(each is not forward for each in self.current.forwards)
        is_late = self.current.is_weighed and is_another and forward.samples
        if is_late and self.current.given is None:
            raise ConfigError(
                "an accumulating backward pass goes through several forward passes, "
                "and a gradient arrived before the samples of all were counted; call "
                "backward() for each forward pass, or set_weight() before"
            )
        if not self.current.is_closed:
            self.current.counted += forward.samples
        if is_another:
            self.current.forwards.append(forward)
        self.current.reduces |= forward.reduces
        return is_new

    def _refuse_uncounted(self, sent: _Pass, forward: _Forward) -> None:
        """Refuses a second backward that completes a reduction from other samples."""
        is_known = any(each is forward for each in sent.forwards)
        if not is_known and sent.given is None and forward.samples:
            raise ConfigError(
                "a backward pass sent some gradients, and the rest belong to another "
                "forward pass, whose samples were not counted; run one backward "
                "through both, or call set_weight() before"
            )

    def _end(self) -> None:
        """Closes the current pass at the end of backward."""
        current, self.current = self.current, None
        if current is None or current.is_closed:
            return
        if not current.has_gradients:  # of inputs alone
            self._ended = current
            self.given = current.given if self.given is None else self.given
            return
        self._add(current)
        self._left = [
            (parameter, _state(parameter.grad))
            for parameter in self._parameters
            if parameter.grad is not None
        ]

    def _add(self, current: _Pass) -> None:
        """Adds a pass whose gradients ``p.grad`` holds or will hold."""
        self._passes.append(current)
        if len({each.given is None for each in self._passes}) == 2:
            self._passes.clear()
            raise ConfigError(
                "set_weight() was called for some of the backward passes accumulated "
                "under no_sync() and not for others; call it for each of them, or for "
                "none"
            )

    def _weighed(self, gradients: Gradients) -> Gradients:
        """Scales gradients by their pass's weight before they are accumulated."""
        current = self._note_gradient()
        if current is None:  # of a forward pass outside of the wrapper
            return gradients
        weight, before = current.weight, current.before
        if not current.is_closed:
            before = [each.weight for each in self._passes]
        first = next((each for each in before if each), 0.0)
        current.is_weighed |= self._is_mean and first > 0.0
        if self._is_mean and self._holds_sum and any(each != weight for each in before):
            raise ConfigError(
                f"a pass of weight {weight:g} after one of {first:g} under no_sync() "
                "cannot be added to gradients that were reduced before; call "
                "zero_grad() after each step"
            )
        if weight and (not first or not self._is_mean):
            return gradients
        return scaled(gradients, weight / first if weight else 0.0)

    def _forget_dropped(self) -> None:
        """Forgets accumulated passes whose gradients the loop has cleared.

        Cleared gradients are None, or zeros of another version. Zeros of the same
        version are real gradients.
        """
        left = reversed(self._left)
        is_there = (p.grad is not None and _state(p.grad) == state for p, state in left)
        if not self._left or any(is_there):
            return
        if not any(_is_something(parameter) for parameter, _ in self._left):
            self._passes.clear()
            self._left.clear()


def _state(gradient: torch.Tensor) -> tuple[int, Any]:
    """Identity and version: differs once the gradient was replaced or written to."""
    return id(gradient), version(gradient)


def _is_something(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.count_nonzero())


def samples_in(inputs: Any, dim: int) -> float:
    """Batch size: the first tensor's size along ``dim``; 1 if there is no tensor.

    For packed sequences, the number of sequences.
    """
    if isinstance(inputs, nn.utils.rnn.PackedSequence):
        return float(inputs.batch_sizes[0]) if len(inputs.batch_sizes) else 0.0
    if isinstance(inputs, torch.Tensor):
        return float(inputs.shape[dim]) if inputs.dim() > dim else 1.0
    for item in items_of(inputs) or ():
        if any(tensor.dim() > dim for tensor in tensors_in(item)):
            return samples_in(item, dim)
    return 1.0
