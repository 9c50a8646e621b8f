"""Deferred weight gradients of a stage.

The idea of such a store is that of zero-bubble pipelines (Qi et al., ICLR 2024); theirs
knows linear layers of Megatron only. A gradient is added straight to ``weight.grad`` in
one product, where autograd makes the product first and adds it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from elche.errors import ConfigError
from elche.pipeline.split_backward.operations import WeightOperation
from elche.torch_internals.held import version
from elche.torch_internals.passes import catch_gradient


@final
class Site:
    """Where a weight was used, with all that its gradient needs.

    Made once per operation and microbatch, on the way of a forward: no more than slots.

    Attributes:
        node: behind the output in autograd's graph; None where autograd runs it.
        operation: what was computed.
        weight: the parameter, or a view of it.
        bias: likewise; None where there is none that learns.
        x: the input; None where autograd keeps it, as under checkpointing.
        version: of the input's memory when it was used.
        grads: gradients of the output that have come; one, or none if nothing of the
            stage's outputs depends on it.
    """

    __slots__ = ("bias", "grads", "node", "operation", "version", "weight", "x")

    def __init__(
        self,
        operation: WeightOperation,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor | None,
        version: int,
    ) -> None:
        self.operation = operation
        self.weight = weight
        self.bias = bias
        self.x: Any = x
        self.version = version
        self.node: Any = None
        self.grads: list[torch.Tensor] = []

    def catch(self, output: torch.Tensor) -> None:
        """Has autograd put the gradient of the output into `grads`.

        The hook is a method of C, so that backward runs no Python.
        """
        self.node = catch_gradient(output, self.grads.append)

    def catch_last(self) -> None:
        """Takes the gradient after all hooks that a user has put there since.

        Those of the output itself come before those of its node, and ours is the last.
        """
        if self.x is not None:
            self.node.register_prehook(self._take)

    def _take(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self.grads[-1:] = gradients[:1]


def hooks_made() -> object:
    """Another value whenever a hook has been put on a tensor or a node since.

    torch numbers the handles of all hooks; where it does not, nobody can be sure.
    """
    return getattr(RemovableHandle, "next_id", None) or object()


_Derived = dict[int, tuple[torch.Tensor, torch.Tensor]]


@final
class WeightGradients:
    """Weight gradients of a stage that wait for their time.

    Attributes:
        deferred_flops: of all that was computed here so far.
        sites: uses of weights in the forward under way.
        runs_again: whether the forward under way had parts that run again in backward,
            as under activation checkpointing.
    """

    def __init__(self) -> None:
        self.deferred_flops = 0
        self.sites: list[Site] = []
        self.runs_again = False
        self._open: list[Site] | None = None
        self._waiting: dict[int, list[Site]] = {}

    def open(
        self, microbatch: int, sites: Sequence[Site], hooks_before: object
    ) -> None:
        """Begins to keep what backward defers, under a microbatch.

        Args:
            microbatch: which one.
            sites: of its forward.
            hooks_before: what :func:`hooks_made` said before it.
        """
        if any(site.grads for site in sites):
            raise differentiates_inside()  # the loss function, say
        self.sites = []  # parts that run again add theirs
        self._open = self._waiting.setdefault(microbatch, [])
        if hooks_made() != hooks_before:
            for site in sites:
                site.catch_last()

    def keep(self, sites: Sequence[Site]) -> None:
        """Keeps the sites whose gradients have come since `open`."""
        for site in (*sites, *self.sites):
            if len(site.grads) > 1:
                raise differentiates_inside()
            if site.grads and site.grads[0] is not None:
                self.add(site)

    @property
    def is_open(self) -> bool:
        """Whether a backward is under way."""
        return self._open is not None

    def close(self) -> None:
        """Ends what `open` has begun, also after an error."""
        self._open, self.sites = None, []

    def add(self, site: Site) -> None:
        """Keeps one whose gradient has come.

        Raises:
            ConfigError: the stage itself calls autograd in its forward.
        """
        if self._open is None:
            raise differentiates_inside()
        self._open.append(site)

    def waiting_for(self, microbatch: int) -> list[torch.Tensor]:
        """Weights and biases whose gradient a microbatch still owes."""
        sites = self._waiting.get(microbatch, ())
        weights = [site.weight for site in sites]
        return weights + [site.bias for site in sites if site.bias is not None]

    def compute(self, microbatch: int) -> list[torch.Tensor]:
        """Computes what waits for a microbatch, into ``grad`` of the parameters.

        The first operation of the forward comes first: its gradient was the last to be
        made and may still be in the cache. Each is let go of as it is done.

        Returns:
            The parameters that got a contribution here and not through autograd.
        """
        touched: list[torch.Tensor] = []
        derived: _Derived = {}
        waiting = self._waiting.pop(microbatch, [])
        waiting.reverse()
        with torch.no_grad():
            while waiting:
                self._settle(waiting.pop(), touched, derived)
        if derived:
            tensors, gradients = zip(*derived.values(), strict=True)
            torch.autograd.backward(tensors, gradients)
        return touched

    def discard(self) -> None:
        """Forgets all that waits."""
        self._waiting.clear()
        self.sites = []

    def _settle(
        self, site: Site, touched: list[torch.Tensor], derived: _Derived
    ) -> None:
        operation, weight, bias = site.operation, site.weight, site.bias
        if version(site.x) != site.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been "
                "modified by an inplace operation: the input of a weight of shape "
                f"{list(weight.shape)} was changed after its use"
            )
        for made in site.grads:
            self.deferred_flops += operation.flops(made, weight)
            grad, x = operation.rows(made, site.x, weight)
            into = weight.grad if weight.is_leaf else None
            if into is not None and into.dtype == grad.dtype == x.dtype:
                operation.add_weight_gradient(grad, x, into)
                touched.append(weight)
            else:
                value = operation.weight_gradient(grad, x, weight.shape)
                _accumulate(weight, value, touched, derived)
            if bias is not None:
                value = operation.bias_gradient(grad)
                if value.shape != bias.shape:  # one element for all
                    value = value.sum_to_size(bias.shape)
                _accumulate(bias, value, touched, derived)


def differentiates_inside() -> ConfigError:
    """The error of a stage that calls autograd in its forward."""
    return ConfigError(
        "the stage differentiates in its own forward, or the loss function does, where "
        "the weights' gradients cannot be deferred; take a schedule that does not "
        "split backward (1f1b, gpipe), or PipelineConfig(split_backward=False)"
    )


def _accumulate(
    target: torch.Tensor,
    value: torch.Tensor,
    touched: list[torch.Tensor],
    derived: _Derived,
) -> None:
    if value.dtype != target.dtype:
        value = value.to(target.dtype)
    if not target.is_leaf:
        if id(target) in derived:
            value = derived[id(target)][1] + value
        derived[id(target)] = (target, value)
        return
    into = target.grad
    if into is None:
        target.grad = value
    else:
        into.add_(value)
    touched.append(target)
