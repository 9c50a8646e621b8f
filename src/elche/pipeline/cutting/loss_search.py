"""Search of a model's trace for its loss, and for the elements the loss averages."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.cutting.between import base_of, changes, place
from elche.pipeline.cutting.own_loss import OwnLoss
from elche.pipeline.cutting.tracing import expression
from elche.pipeline.cutting.whole_calls import call_whole
from elche.torch_internals.batches import tree_map

_aten = torch.ops.aten
_CROSS_ENTROPY = _aten.cross_entropy_loss.default
_OPERATOR = type(_aten.mse_loss.default)
_BY_SAMPLES = (
    _aten.mse_loss.default,
    _aten.l1_loss.default,
    _aten.binary_cross_entropy_with_logits.default,
)


def find_own_loss(graph: fx.Graph, output: Any, arguments: Arguments) -> OwnLoss | None:
    """Finds the loss in a traced model's output, and the elements that it averages."""
    ends = iter(next(node for node in graph.nodes if node.op == "output").args[0])
    loss = OwnLoss(arguments)(tree_map(lambda _: next(ends), output))
    if loss is None:
        return None
    if fault := _fault(graph, loss, arguments):
        return OwnLoss(arguments, fault=fault)
    if loss.target in _BY_SAMPLES:
        return OwnLoss(arguments)
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = _needed(graph, loss.args[1])
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(copies[loss.args[1]])
    inputs = [node for node in made.nodes if node.op == "placeholder"]
    place(made, torch.device("cpu"))
    for node in made.nodes:
        is_known = node in inputs or node.op == "output" or node.target is torch.tensor
        if not is_known and not isinstance(node.target, _OPERATOR):
            fault = f"the labels of this one depend on {node.name}"
            return OwnLoss(arguments, fault=fault)
        node.meta = {}  # else it keeps the trace alive
    pairs = zip(arguments.owners, inputs, strict=True)
    used = frozenset(name for name, node in pairs if node.users)
    return OwnLoss(arguments, fx.GraphModule({}, made), used)


def _fault(graph: fx.Graph, loss: Any, arguments: Arguments) -> str:
    """Reason why a loss is not a mean over labels or samples; "" if it is one."""
    if loss.target is call_whole:
        return f"this one ends in the submodule {loss.args[0]}"
    is_plain = not (loss.args[2:] or loss.kwargs)  # a mean, without weights
    by_samples = loss.target in _BY_SAMPLES
    if not is_plain or not (by_samples or loss.target == _CROSS_ENTROPY):
        return f"this one ends in {loss.target}"
    inputs = zip(arguments.owners, graph.nodes, strict=False)
    firsts = [_sizes(node) for name, node in inputs if name == arguments.first]
    batch = next(size for size, *_ in filter(None, firsts))
    sizes, others = map(_sizes, loss.args[:2])
    if by_samples:  # the parts have equal sizes, independent of values
        each = prod(sizes) / batch
        bad = batch.free_symbols | free_unbacked_symbols(loss.args[0].meta["val"])
        is_right = sizes == others and not each.free_symbols & bad
    else:  # classes must not be other samples, as in contrastive losses
        classes = 0 * batch + sum(sizes[1:2])
        is_right = bool(sizes[1:]) and not classes.free_symbols & batch.free_symbols
    return "" if is_right else f"the terms of this one, of sizes {sizes}, share samples"


def _sizes(node: Any) -> list[Any]:
    return [expression(size) for size in node.meta["val"].shape]


def _needed(graph: fx.Graph, labels: fx.Node) -> set[fx.Node]:
    """Nodes that contribute to a value, including changes in place."""
    needed = {labels, base_of(labels)}
    for node in reversed(graph.nodes):
        if node in needed or (changes(node) and base_of(node) in needed):
            needed |= {node, *node.all_input_nodes}
            needed |= set(map(base_of, node.all_input_nodes))
    return needed
