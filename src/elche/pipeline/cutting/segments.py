"""Cut of a plain module into layers: consecutive parts of its traced forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import fx, nn

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import REMEDY
from elche.pipeline.cutting.between import base_of, changes, texts, where
from elche.pipeline.cutting.caching import (
    CACHE_MARK,
    PAST,
    CachedSegment,
    takes_cache,
)
from elche.pipeline.cutting.loss_search import find_own_loss
from elche.pipeline.cutting.tracing import Code, ModelTrace, trace_again, trace_calls
from elche.pipeline.cutting.whole_calls import call_whole
from elche.pipeline.cutting.whole_modules import (
    CutChoice,
    SplitPoints,
    at_blocks,
    at_points,
    has_parameters,
)
from elche.torch_internals.batches import tree_map, tree_structure

_LOCAL = ("placeholder", "get_attr", "output")


@final
class Segment(nn.Module):
    """A part of a model's forward; accepts and returns the values live at its ends.

    Args:
        body: the part's code and the model's modules in it.
        codes: code in training (True) and in evaluation; one if they are equal.
        device: device of the trace.
    """

    def __init__(
        self, body: fx.GraphModule, codes: dict[bool, Code], device: torch.device
    ) -> None:
        super().__init__()
        self.body = body
        self._codes = codes
        self._device = device
        self._mode = next(iter(codes))

    def forward(self, *values: Any) -> Any:
        """Runs the part on the device of its inputs, in the mode of its modules."""
        given = next((one for one in values if isinstance(one, torch.Tensor)), None)
        device = self._device if given is None else given.device
        mode = self._mode if len(self._codes) == 1 else self._mode_of_modules()
        if (device, mode) != (self._device, self._mode):
            self._write(device, mode)
        found = self.body(*values)
        if self._codes[mode].output is None:
            return tuple(found)
        leaves = iter(found)
        return tree_map(lambda _: next(leaves), self._codes[mode].output)

    def _mode_of_modules(self) -> bool:
        nodes = [one for one in self.body.graph.nodes if one.op == "call_module"]
        modes = {
            one.target: self.body.get_submodule(one.target).training for one in nodes
        }
        if {*modes.values()} != {self.training}:
            raise ConfigError(
                f"code after {', '.join(modes)} differs between training and "
                "evaluation, and some of these modules and the model around them are "
                "in training, some not; set one mode (pipe.train(), not the "
                "model's own train or eval), or cut between them (split_points=)"
            )
        return self.training

    def _write(self, device: torch.device, mode: bool) -> None:
        """Makes the body run the code of a mode, with new tensors on a device."""
        old = self._device

        def placed(value: Any) -> Any:
            return device if isinstance(value, torch.device) and value == old else value

        for code in self._codes.values():
            for node in code.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, placed)
                node.kwargs = fx.node.map_aggregate(node.kwargs, placed)
        self._device, self._mode = device, mode
        self.body.graph = self._codes[mode].graph  # compiles it


@final
class FirstSegment(nn.Module):
    """The first part, with the arguments of the model's forward.

    Attributes:
        arguments: arguments of the model's trace.
        own_loss: the loss that the model computes itself in training, if any.

    Args:
        rest: the part's code.
        trace: the model's trace.
    """

    def __init__(self, rest: Segment, trace: ModelTrace) -> None:
        super().__init__()
        self.rest, self.arguments = rest, trace.arguments
        training = trace.codes.get(True)
        self.own_loss = training and find_own_loss(
            training.graph, training.output, trace.arguments
        )

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
    trace_by: Callable[[nn.Module, Mapping[int, str], Any], ModelTrace],
) -> list[nn.Module]:
    choice = at_blocks(model) if points is None else at_points(model, points)
    whole = {id(model.get_submodule(name)): name for name in choice.whole}
    trace = trace_by(model, whole, sample)
    layers = _layers(model, choice, trace)
    made: list[nn.Module] = []
    for index, codes in enumerate(layers):
        body = _body(model, trace.held, codes)
        segment = Segment(body, codes, trace.device)
        segment.training = model.training  # it stands for the model's own code
        if trace.is_cached:
            made.append(CachedSegment(segment, None if index else trace.arguments))
        else:
            made.append(segment if index else FirstSegment(segment, trace))
    _check_buffers(trace.changed, made)
    called = {name for one in trace.codes.values() for name in _called(one.graph.nodes)}
    for name in choice.whole:
        if name not in called:  # unused by forward, but part of the model's state
            body.add_submodule(name, model.get_submodule(name))
    return made


def _layers(
    model: nn.Module, choice: CutChoice, trace: ModelTrace
) -> list[dict[bool, Code]]:
    """Cuts the traces into the codes of each layer.

    Raises:
        ConfigError: training and evaluation call different submodules.
    """
    made: dict[bool, list[Code]] = {}
    called: list[list[list[str]]] = []
    for mode, one in trace.codes.items():
        parts = _parts(one.graph, choice)
        if choice.merges:
            parts = _merged(parts, model)
        ends = _live(one.graph, parts)
        outputs = [None] * (len(parts) - 1) + [one.output]
        made[mode] = [
            Code(_graph(nodes, ends[i], ends[i + 1], trace.is_cached), outputs[i])
            for i, nodes in enumerate(parts)
        ]
        called.append([_called(nodes) for nodes in parts])
    if called[0] != called[-1]:
        names = [{name for each in one for name in each} for one in called]
        raise ConfigError(
            "forward calls other submodules in training than in evaluation "
            f"({', '.join(sorted(names[0] ^ names[-1])) or 'in another order'}); "
            f"{REMEDY}"
        )
    codes = [
        dict(zip(made, each, strict=True)) for each in zip(*made.values(), strict=True)
    ]
    return [
        each if _differ(*each.values()) else dict([*each.items()][:1]) for each in codes
    ]


def _differ(one: Code, other: Code | None = None) -> bool:
    """True if the codes of two modes differ."""
    return other is not None and (
        texts(one.graph) != texts(other.graph)
        or tree_structure(one.output) != tree_structure(other.output)
    )


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
        return any(has_parameters(model.get_submodule(name)) for name in _called(nodes))

    made = [parts[0]]
    for nodes in parts[1:]:
        if learns(made[-1]):
            made.append(nodes)
        else:
            made[-1] = made[-1] + nodes
    if len(made) > 1 and not learns(made[-1]):
        made[-2:] = [made[-2] + made[-1]]
    return made


def _called(nodes: Iterable[fx.Node]) -> list[str]:
    """Names of the submodules that a layer calls, in order."""
    return [str(one.args[0]) for one in nodes if one.target is call_whole]


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
        if changes(node) and base_of(node.args[0]) not in own:
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


def _body(
    model: nn.Module, held: Mapping[str, torch.Tensor], codes: Mapping[bool, Code]
) -> fx.GraphModule:
    """Module of the model's own objects that a layer's codes use."""
    nodes = [node for code in codes.values() for node in code.graph.nodes]
    root: dict[str, Any] = {
        node.target: model.get_submodule(node.target)
        for node in nodes
        if node.op == "call_module"
    }
    used = {node.target: held[node.target] for node in nodes if node.op == "get_attr"}
    body = fx.GraphModule({**root, **used}, next(iter(codes.values())).graph)
    saved = {id(one) for one in model.state_dict(keep_vars=True).values()}
    for name, one in used.items():
        if isinstance(one, nn.Parameter):
            body.register_parameter(name, one)
        else:
            body.register_buffer(name, one, persistent=id(one) in saved)
    return body
