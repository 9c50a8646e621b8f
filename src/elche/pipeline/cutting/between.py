"""Rewrites traced code between calls of uncut modules, so that any layer can run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import REMEDY
from elche.pipeline.cutting.whole_calls import call_whole

CONSTANT_ELEMENTS = 4096
"""Largest number of elements of a constant, which is stored as code text."""


def settle(made: fx.GraphModule, names: Mapping[int, str]) -> fx.Graph:
    """Rewrites a trace so that it can be cut anywhere.

    Args:
        made: the trace; its graph is changed.
        names: name of each of the model's parameters and buffers, by the id of its fake
            tensor in the trace.
    """
    for node in [one for one in made.graph.nodes if one.op == "get_attr"]:
        value = getattr(made, node.target)
        if id(value) in names:
            node.target = names[id(value)]
        else:
            _put_constant(node, value)
    _detach_without_grad(made.graph)
    return made.graph


def _put_constant(node: fx.Node, value: torch.Tensor) -> None:
    """Replaces a constant by code that creates it on its layer's device."""
    if value.is_meta or value.numel() > CONSTANT_ELEMENTS:
        raise ConfigError(
            f"forward makes a constant of shape {list(value.shape)} on {value.device} "
            f"{where(node)}; expected one with values, of at most {CONSTANT_ELEMENTS} "
            f"elements: register it as a buffer of the model, or {REMEDY}"
        )
    options: Any = {"dtype": value.dtype, "device": value.device}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(torch.tensor, (value.tolist(),), options)
    made.meta = {"val": value}
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _detach_without_grad(graph: fx.Graph) -> None:
    """Replaces `torch.no_grad` by detached inputs, so that its block may be cut.

    Uncut modules switch gradients off and on themselves when they run. The trace
    contains these switches as empty pairs, which are dropped.
    """
    has_grad, casts = True, 0
    switches: list[fx.Node] = []
    found: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        name = "" if node.op == "get_attr" else getattr(node.target, "__name__", "")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_inference():
            raise ConfigError(
                f"forward uses torch.inference_mode {where(node)}, which makes tensors "
                f"that no backward pass may save; use torch.no_grad, or {REMEDY}"
            )
        if name.endswith("set_grad_enabled"):
            has_grad, found = bool(node.args[0]), {}
            switches.append(node)
        elif name.endswith(("enter_autocast", "exit_autocast")):
            casts += 1 if name.endswith("enter_autocast") else -1
            switches.append(node)
        elif node.op == "call_function" and (casts or not has_grad):
            if casts or node.target is call_whole:
                raise ConfigError(
                    f"forward uses {'autocast' if casts else 'torch.no_grad'} around "
                    f"code {where(node)}, which a cut might split (to freeze a module, "
                    f"call requires_grad_(False)); {REMEDY}"
                )
            if changes(node):  # its result is its input, which keeps its gradient
                node.replace_all_uses_with(node.args[0])
            _detach_inputs(node, found)
    for node in reversed(switches):
        graph.erase_node(node)


def _detach_inputs(node: fx.Node, found: dict[fx.Node, fx.Node]) -> None:
    for one in node.all_input_nodes:
        is_tensor = isinstance(one.meta.get("val"), torch.Tensor)
        if one not in found and (is_tensor or one.op == "get_attr"):
            with node.graph.inserting_before(node):
                detach = torch.ops.aten.detach.default
                found[one] = node.graph.call_function(detach, (one,))
    node.args = fx.node.map_arg(node.args, lambda one: found.get(one, one))
    node.kwargs = fx.node.map_arg(node.kwargs, lambda one: found.get(one, one))
    found[node] = node


def texts(graph: fx.Graph) -> list[str]:
    """Comparable texts of a graph's nodes: numbers replace names, which may differ."""
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    return [
        str(fx.node.map_arg((str(one.target), one.args, one.kwargs), number.get))
        for one in graph.nodes
        if one.op != "placeholder"
    ]


def place(
    graph: fx.Graph, device: torch.device, old: torch.device | None = None
) -> None:
    """Makes code create its tensors on a device, in place of `old` or the default."""

    def placed(value: Any) -> Any:
        is_old = isinstance(value, torch.device) and old in (None, value)
        return device if is_old else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, placed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, placed)


def where(node: fx.Node) -> str:
    """Text that names the submodules before and after a node, for messages."""
    before, after, is_seen = "the input", "the output", False
    for one in node.graph.nodes:
        is_seen = is_seen or one is node
        if one.target is call_whole and one is not node:
            if is_seen:
                after = str(one.args[0])
                break
            before = str(one.args[0])
    return f"between {before} and {after}"


def changes(node: fx.Node) -> bool:
    """True if a node changes its first argument in place, by torch's convention."""
    parts = str(node.target).split(".")
    return len(parts) == 3 and parts[1].endswith("_") and not parts[1].endswith("__")


def base_of(node: Any) -> Any:
    """Node of the tensor behind a view or behind the result of an in-place change."""
    while isinstance(node, fx.Node) and (
        getattr(node.target, "is_view", False) or changes(node)
    ):
        node = node.args[0]
    return node
