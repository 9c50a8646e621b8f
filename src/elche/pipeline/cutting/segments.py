"""Cut of a plain module into layers: consecutive parts of its traced forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import fx, nn

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.cutting.caching import (
    CACHE_MARK,
    PAST,
    CachedSegment,
    takes_cache,
)
from elche.pipeline.cutting.own_loss import OwnLoss, find_own_loss
from elche.pipeline.cutting.tracing import (
    CallTrace,
    trace_again,
    trace_calls,
    where,
)
from elche.pipeline.cutting.whole_calls import REMEDY, call_whole
from elche.pipeline.cutting.whole_modules import (
    CutChoice,
    SplitPoints,
    at_blocks,
    at_points,
    has_parameters,
)
from elche.torch_internals.batches import tree_map

_LOCAL = ("placeholder", "get_attr", "output")


@final
class Segment(nn.Module):
    """A part of a model's forward; accepts and returns the values live at its ends.

    Args:
        body: the part's code and the model's modules in it.
        device: device of the trace.
        output: structure of the model's output, if this is its last part, else None.
    """

    def __init__(
        self, body: fx.GraphModule, device: torch.device, output: Any = None
    ) -> None:
        super().__init__()
        self.body = body
        self._device = device
        self._output = output

    def forward(self, *values: Any) -> Any:
        """Runs the part on the device of its inputs."""
        given = next((one for one in values if isinstance(one, torch.Tensor)), None)
        if given is not None and given.device != self._device:
            self._place(given.device)
        found = self.body(*values)
        if self._output is None:
            return tuple(found)
        leaves = iter(found)
        return tree_map(lambda _: next(leaves), self._output)

    def _place(self, device: torch.device) -> None:
        """Moves tensor creation in the code from the trace's device to another."""

        def placed(value: Any) -> Any:
            is_old = isinstance(value, torch.device) and value == self._device
            return device if is_old else value

        for node in self.body.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, placed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, placed)
        self.body.recompile()
        self._device = device


@final
class FirstSegment(nn.Module):
    """The first part, with the arguments of the model's forward.

    Args:
        rest: the part's code.
        arguments: arguments of the model's trace.
        own_loss: the loss that the model computes itself, if any.
    """

    def __init__(
        self, rest: Segment, arguments: Arguments, own_loss: OwnLoss | None
    ) -> None:
        super().__init__()
        self.rest = rest
        self.arguments, self.own_loss = arguments, own_loss

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Runs the part on a batch like the sample, of any size."""
        return self.rest(*self.arguments.tensors_of(args, keywords))

    def omits(self, batch: Any, keywords: Mapping[str, Any]) -> list[str]:
        """Arguments with tensors in the sample that a batch leaves out, or has as None.

        Raises:
            ConfigError: the model's forward does not take the batch.
        """
        return self.arguments.omitted_by(batch, keywords)


def cut_model(
    model: nn.Module, points: SplitPoints | None, sample: Any
) -> list[nn.Module]:
    """Cuts a model into layers that hold its own modules.

    Args:
        model: any module; it is not modified.
        points: see `elche.pipeline.pipeline_config.PipelineConfig.split_points`; None
            cuts around the members of its chains of blocks.
        sample: one microbatch of its input.

    Raises:
        ConfigError: there is no such submodule, or the code between uncut submodules
            cannot be cut.
    """
    if sample is None:
        raise ConfigError(
            f"a {type(model).__name__} is cut by tracing it: give sample=, one "
            "microbatch of its input; or the layers with split=lambda model: [...]"
        )
    layers = _cut(model, points, sample, trace_calls)
    if points is not None and len(layers) <= len(points):
        raise ConfigError(
            f"the split points {list(points)} cut the model into {len(layers)} layers; "
            "expected names of submodules that forward calls, with others before or "
            "between them"
        )
    return layers


def cut_again(
    model: nn.Module,
    points: SplitPoints | None,
    sample: Any,
    omitted: Collection[str],
    has_cache: bool,
) -> list[nn.Module]:
    """Cuts the model into the layers of `cut_model`, for evaluation alone.

    Args:
        model: model to cut; its parts may be on several devices.
        points: as in `cut_model`.
        sample: as in `cut_model`.
        omitted: arguments of the sample that are None.
        has_cache: whether layers take a cache, see `elche.pipeline.cutting.caching`.

    Raises:
        ConfigError: its forward cannot be traced without these arguments, or with a
            cache.
    """
    if has_cache and not takes_cache(model):
        raise ConfigError("no layer takes cache=")
    trace_by = partial(trace_again, omitted=omitted, has_cache=has_cache)
    return _cut(model, points, sample, trace_by)


def _cut(
    model: nn.Module,
    points: SplitPoints | None,
    sample: Any,
    trace_by: Callable[[nn.Module, Mapping[int, str], Any], CallTrace],
) -> list[nn.Module]:
    choice = at_blocks(model) if points is None else at_points(model, points)
    whole = {id(model.get_submodule(name)): name for name in choice.whole}
    trace = trace_by(model, whole, sample)
    parts = _parts(trace.graph, choice)
    if choice.merges:
        parts = _merged(parts, model)
    ends = _live(trace.graph, parts)
    made: list[nn.Module] = []
    for index, nodes in enumerate(parts):
        graph = _graph(nodes, ends[index], ends[index + 1], trace.is_cached)
        body = fx.GraphModule(_root(model, trace.used, graph, nodes), graph)
        _keep_out_of_state(body, model)
        output = trace.output if index == len(parts) - 1 else None
        segment = Segment(body, trace.device, output)
        if trace.is_cached:
            made.append(CachedSegment(segment, None if index else trace.arguments))
        else:
            loss = find_own_loss(trace.graph, trace.output, trace.arguments)
            first = FirstSegment(segment, trace.arguments, loss)
            made.append(segment if index else first)
    _check_buffers(trace.changed, made)
    called = {node.args[0] for node in trace.graph.nodes if node.target is call_whole}
    for name in choice.whole:
        if name not in called:  # unused by forward, but part of the model's state
            body.add_submodule(name, model.get_submodule(name))
    return made


def _check_buffers(
    changed: Mapping[str, torch.Tensor], layers: Sequence[nn.Module]
) -> None:
    for name, one in changed.items():
        holders = [
            layer for layer in layers if any(one is each for each in layer.buffers())
        ]
        if len(holders) > 1:
            raise ConfigError(
                f"forward changes the buffer {name} in {len(holders)} layers, because "
                "its module runs more than once; cut so that it runs in one layer "
                "(split_points=), or give each call a module of its own"
            )


def _parts(graph: fx.Graph, choice: CutChoice) -> list[list[fx.Node]]:
    """Nodes of each layer in order.

    A layer begins with a call. Code after a call, which may change its result in place,
    stays in the call's layer.
    """
    parts: list[list[fx.Node]] = [[]]
    last: str | None = None
    for node in graph.nodes:
        if node.op in _LOCAL:
            continue
        if node.target is call_whole:
            name = str(node.args[0])
            if last is not None and (name in choice.before or last in choice.after):
                parts.append([])
            last = name
        parts[-1].append(node)
    return parts


def _merged(parts: list[list[fx.Node]], model: nn.Module) -> list[list[fx.Node]]:
    """Joins layers without parameters, which no optimizer accepts, to neighbours."""

    def learns(nodes: list[fx.Node]) -> bool:
        called = [str(one.args[0]) for one in nodes if one.target is call_whole]
        return any(has_parameters(model.get_submodule(name)) for name in called)

    made = [parts[0]]
    for nodes in parts[1:]:
        if learns(made[-1]):
            made.append(nodes)
        else:
            made[-1] = made[-1] + nodes
    if len(made) > 1 and not learns(made[-1]):
        made[-2:] = [made[-2] + made[-1]]
    return made


def _live(graph: fx.Graph, parts: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Values live at the ends of layers, including the input and the output."""
    number = {node: index for index, nodes in enumerate(parts) for node in nodes}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last = {
        node: max((number.get(user, len(parts) - 1) for user in node.users), default=-1)
        for node in graph.nodes
    }
    ends = [inputs]
    for index in range(1, len(parts)):
        ends.append(
            [
                node
                for node in graph.nodes
                if node.op not in ("get_attr", "output")
                and number.get(node, -1) < index <= last[node]
            ]
        )
    output = next(node for node in graph.nodes if node.op == "output")
    return [*ends, list(output.args[0])]


def _graph(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    is_cached: bool,
) -> fx.Graph:
    """Builds a layer's own graph."""
    graph = fx.Graph()
    here = {node: graph.placeholder(node.name) for node in inputs}
    marked = {CACHE_MARK: graph.placeholder(PAST)} if is_cached else {}
    own = set(nodes)

    def mapped(node: fx.Node) -> fx.Node:
        if node not in here:
            assert node.op == "get_attr", "everything else lives across the end"
            here[node] = graph.node_copy(node)
        return here[node]

    for node in nodes:
        if _changes(node) and _viewed(node.args[0]) not in own:
            raise ConfigError(
                f"forward changes a tensor from before a cut in place {where(node)} "
                f"({node.target}); use the out-of-place operation, or {REMEDY}"
            )
        if node.target is call_whole:
            mapped_args: Any = fx.node.map_aggregate(
                fx.node.map_arg(node.args, mapped),
                lambda one: marked.get(one, one) if isinstance(one, str) else one,
            )
            here[node] = graph.call_module(*mapped_args)
        else:
            here[node] = graph.node_copy(node, mapped)
            here[node].meta = {}  # it would keep the trace alive
    graph.output(tuple(fx.node.map_arg(list(outputs), mapped)))
    return graph


def _changes(node: fx.Node) -> bool:
    """True if a node changes its first argument in place, by torch's convention."""
    parts = str(node.target).split(".")
    return len(parts) == 3 and parts[1].endswith("_") and not parts[1].endswith("__")


def _viewed(node: Any) -> Any:
    """Base node of a view; the node itself if it is not a view."""
    while isinstance(node, fx.Node) and getattr(node.target, "is_view", False):
        node = node.args[0]
    return node


def _root(
    model: nn.Module,
    used: Mapping[str, torch.Tensor | None],
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
) -> dict[str, Any]:
    """The model's own objects that a layer's graph uses, by name."""
    root: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            if used[node.target] is None:
                raise ConfigError(
                    f"forward makes a tensor of constants {where(nodes[0])} or later "
                    f"in that layer; register it as a buffer of the model, or {REMEDY}"
                )
            root[node.target] = used[node.target]
        elif node.op == "call_module":
            root[node.target] = model.get_submodule(node.target)
    return root


def _keep_out_of_state(body: fx.GraphModule, model: nn.Module) -> None:
    """Marks buffers as non-persistent that the model does not save."""
    state = model.state_dict(keep_vars=True)
    saved = {id(one) for one in state.values()}
    for name, one in list(body.named_buffers(recurse=False)):
        if id(one) not in saved:
            delattr(body, name)
            body.register_buffer(name, one, persistent=False)
