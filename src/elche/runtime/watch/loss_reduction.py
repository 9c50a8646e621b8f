"""Detection of a loss that is a sum over the batch, in the graph of the first backward.

Gradients of a sum that are reduced as those of a mean are another gradient than one
device's, and nothing else shows it. Only what cannot be a mean is one here: torch's own
losses with ``reduction="sum"``, and a sum of those with ``"none"`` or of squared or
absolute differences, alone or with others added. What is multiplied or divided
afterwards may have been made a mean by that, and no graph tells a mean over the batch
from one over a sample's elements: of those nothing is said.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from elche.errors import ConfigError
from elche.torch_internals.passes import backward_roots, saved_reduction

SUM = "sum"
PART = "part"
"""A sum that a sum may be added to, but that may be of anything by itself."""
ADDITIONS = frozenset(
    f"{name}Backward0"
    for name in ("Add", "Sub", "Neg", "ToCopy", "View", "Alias", "Clone", "Squeeze")
)
DISTANCES = frozenset({"PowBackward0", "AbsBackward0"})


@final
class SumLossWatch:
    """Refuses a loss that is a sum, in the first backward pass of the loop.

    Args:
        parameters: the trainable ones, whose gradients are reduced as of a mean.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._thread = threading.get_ident()
        self._handle: RemovableHandle | None = register_multi_grad_hook(
            parameters, self._look, mode="any"
        )

    def detach(self) -> None:
        """Ends it."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, gradient: torch.Tensor) -> None:
        roots = backward_roots(self._thread)
        if not roots:
            return  # torch.autograd.grad
        self.detach()
        if all(is_sum(root.grad_fn) for root in roots):
            raise ConfigError(
                "the loss is a sum over the batch, but gradients are taken for those "
                "of a mean, which is another result than on one device: give "
                "elche.setup (or elche.Trainer) loss_reduction='sum', or make the loss "
                "a mean"
            )


def is_sum(root: Any) -> bool:
    """Whether a loss is certainly a sum over a batch, by its node in the graph."""
    nodes, seen, kinds = [root], {root, None}, set()
    while nodes:
        node = nodes.pop()
        if _name(node) in ADDITIONS:
            added = {each for each, _ in node.next_functions} - seen
            nodes += added
            seen |= added
        else:
            kinds.add(_kind(node))
    return SUM in kinds and kinds <= {SUM, PART}


def _kind(node: Any) -> str:
    """What one of the terms of a loss is: `SUM`, `PART`, or anything else."""
    below = _inputs(node)
    if _name(node) == "MulBackward0":
        is_part = len(below) == 1 and _kind(below[0]) in (SUM, PART)
        return PART if is_part else ""
    if own := saved_reduction(node):
        return own if _are_computed(below) else ""
    if _name(node) != "SumBackward0":
        return ""
    (summed,) = below
    inner = saved_reduction(summed)
    if inner in ("mean", SUM):  # of one element
        return _kind(summed)
    if _name(summed) in DISTANCES:
        (summed,) = _inputs(summed)
    is_known = inner == "none" or _name(summed) == "SubBackward0"
    return SUM if is_known and _are_computed(_inputs(summed)) else PART


def _name(node: Any) -> str:
    return "" if node is None else str(node.name())


def _inputs(node: Any) -> list[Any]:
    """Nodes below one, without constants."""
    found = () if node is None else node.next_functions
    return [each for each, _ in found if each is not None]


def _are_computed(nodes: list[Any]) -> bool:
    """Whether no parameter is among them: a sum over one is over no batch."""
    return not any(_name(node) == "torch::autograd::AccumulateGrad" for node in nodes)
