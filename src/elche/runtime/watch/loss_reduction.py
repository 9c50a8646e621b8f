"""Detection of a loss that is a sum over the batch, in the graph of the first backward.

If a sum's gradients are reduced like a mean's, they differ from those of one device,
and nothing else shows it. Only a loss that cannot be a mean counts as a sum: torch's
own losses with ``reduction="sum"``, and sums of losses with ``"none"``, or of squared
or absolute differences, alone or with others added. A product or quotient of a sum may
be a mean, and no graph distinguishes a mean over the batch from one over a sample's
elements: those are not reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from elche.comm.tensors.nested import batch_length, outputs_in
from elche.errors import ConfigError
from elche.runtime.watch.live_graph import ModelHook
from elche.torch_internals.passes import (
    backward_roots,
    graph_task_id,
    mean_of_targets,
    saved_reduction,
)

SUM = "sum"
PART = "part"
"""Kind of a term that may be added to a sum, but is no sum over a batch by itself."""
ADDITIONS = frozenset(
    f"{name}Backward0"
    for name in ("Add", "Sub", "Neg", "ToCopy", "View", "Alias", "Clone", "Squeeze")
)
DISTANCES = frozenset({"PowBackward0", "AbsBackward0"})
LOOKS = 20
"""Number of backward passes to inspect; each inspection waits for the device."""
WHOLE = 2
"""Number of whole batches after which the batch size counts as known."""


@final
class LossWatch:
    """Inspects losses of the first backward passes, which are assumed to be means.

    A sum is refused. A mean over something other than samples, by which gradients are
    weighed, is reported once per run.

    Args:
        emit: writes a line for the user.
        refuses_sums: gradients are assumed to be those of a mean.
        is_on: gradients are weighed by samples.

    Attributes:
        is_on: as given, until something was reported.
    """

    def __init__(
        self, emit: Callable[[str], None], *, refuses_sums: bool, is_on: bool
    ) -> None:
        self._emit = emit
        self._refuses_sums = refuses_sums
        self._batch: Any = None
        self._samples = self._looks = self._whole = 0
        self._sizes: set[int] = set()  # of whole batches
        self._is_watching = refuses_sums
        self._handles: list[RemovableHandle] = []
        self._thread, self._task = 0, -1
        self.is_on = is_on

    def attach(self, parameters: Iterable[torch.Tensor], *, is_weighed: bool) -> None:
        """Starts the inspection, once, in the thread that trains.

        Args:
            parameters: the trained ones: a hook of the outputs would not see a model
                that is compiled, or called by another method.
            is_weighed: gradients are weighed by samples.
        """
        if self._is_watching and not self._handles:
            self.is_on &= is_weighed
            self._thread, hook = threading.get_ident(), ModelHook(self._came)
            self._handles = [each.register_hook(hook) for each in parameters]

    def detach(self) -> None:
        """Ends the inspection."""
        while self._handles:
            self._handles.pop().remove()

    def _came(self, gradient: torch.Tensor) -> None:
        """A hook of gradients, in any backward pass."""
        if self._task == (task := graph_task_id()):
            return
        self._task = task
        if roots := backward_roots(self._thread):  # none in torch.autograd.grad
            self.look(roots)

    def begin(self, batch: Any, samples: int) -> None:
        """Records a batch and its expected samples; 0: this rank has no part.

        A shorter batch is reported only after whole batches of its expected size, or of
        two sizes: before, the dimension that counts samples is not known.
        """
        self._batch, self._samples = batch if self._is_watching else None, samples
        if not (self.is_on and samples and self._whole >= 0):
            return
        first = batch[0] if isinstance(batch, list | tuple) and batch else batch
        is_plain = isinstance(first, torch.Tensor) and first.dim() > 0
        length = len(first) if is_plain else batch_length(batch)
        sizes = self._sizes
        is_known = self._whole >= WHOLE and (samples in sizes or len(sizes) > 1)
        if length < samples and is_known:
            what = f"a batch of {length} samples arrived where {samples} were requested"
            self._hint(f"{what} (a collate_fn that drops some?)", "len(batch[0])")
        if length == samples:
            sizes.add(length)
        self._whole = self._whole + (length == samples) if length <= samples else -1

    def look(self, roots: Sequence[torch.Tensor]) -> None:
        """Inspects the losses of a backward pass.

        Raises:
            ConfigError: the losses of the first pass are sums.
        """
        self._look(roots)
        if not self._is_watching:
            self.detach()
        is_first, self._refuses_sums = self._refuses_sums, False
        if is_first and all(is_sum(root.grad_fn) for root in roots):
            raise ConfigError(
                "the loss is a sum over the batch, but gradients are weighted as "
                "those of a mean, so the result differs from one device: give "
                "elche.setup (or elche.Trainer) loss_reduction='sum', or make the "
                "loss a mean"
            )

    def _look(self, roots: Sequence[torch.Tensor]) -> None:
        lengths = {len(t) for t in outputs_in(self._batch) if t.dim()}
        found = (t for t in outputs_in(self._batch) if t.dtype is torch.int64)
        found = (t for t in found if t.layout is torch.strided and not t.is_nested)
        labels = [t.reshape(len(t), -1) for t in found if t.dim() and t.numel()]
        self._looks += 1
        for has_weights, ignored in _means(roots) if self.is_on else ():
            counts = [(each != ignored).sum(1) for each in labels]
            if has_weights:
                self._hint("the loss is a mean over class weights", "w[labels].sum()")
            elif odd := [count for count in counts if bool((count != count[0]).any())]:
                left = f"{int(odd[0].sum())} targets, without ignored ones,"
                weight = f"(labels != {ignored}).sum()"
                self._hint(f"the loss is a mean over {left}", weight)
            elif labels and len(lengths) == 1 and max(lengths) % max(1, self._samples):
                what = f"the loss is a mean over {max(lengths)} targets"
                self._hint(what, "len(labels)")
        self._is_watching = self.is_on and self._looks < LOOKS

    def _hint(self, what: str, weight: str) -> None:
        self.is_on = False
        self._emit(
            f"elche: {what} in a batch of {self._samples} samples, by which ranks are "
            f"weighted: pass weight_of=lambda batch: {weight}, or the result differs "
            "from one device"
        )


def _means(roots: Sequence[torch.Tensor]) -> Iterator[tuple[bool, int]]:
    """Means over targets among the terms of a loss."""
    nodes: list[Any] = [root.grad_fn for root in roots]
    while nodes:
        node = nodes.pop()
        if found := mean_of_targets(node):
            yield found
        elif _name(node) in ADDITIONS or _name(node)[:3] in ("Mul", "Div"):
            nodes += _inputs(node)


def is_sum(root: Any) -> bool:
    """True if a loss is certainly a sum over a batch, by its node in the graph."""
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
    """Kind of one of the terms of a loss: `SUM`, `PART`, or anything else."""
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
    """Input nodes of a node, without constants."""
    found = () if node is None else node.next_functions
    return [each for each, _ in found if each is not None]


def _are_computed(nodes: list[Any]) -> bool:
    """True if no parameter is among them: a sum over one is not over a batch."""
    return not any(_name(node) == "torch::autograd::AccumulateGrad" for node in nodes)
