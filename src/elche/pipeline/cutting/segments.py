"""Cut of a plain module into layers: consecutive parts of its traced forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import REMEDY
from elche.pipeline.cutting.between import base_of, changes, place, texts, where
from elche.pipeline.cutting.caching import CACHE_MARK, PAST, after_past, takes_cache
from elche.pipeline.cutting.loss_search import find_own_loss
from elche.pipeline.cutting.tracing import Code, trace_calls
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


class Segment(nn.Module):
    """Part of a model's forward; its inputs and outputs are the live values.

    Attributes:
        arguments: arguments of the model's trace, if this is its first part.
        own_loss: the loss that the model computes itself in training, if any; only set
            in the first part.

    Args:
        model: the model.
        held: the model's own parameters and buffers, by their names in the codes.
        device: device of the trace.
        codes: the part's code in training (True) and in evaluation (False); only one
            entry if they are equal.
    """

    arguments: Any = None
    own_loss: Any = None

    def __init__(
        self,
        model: nn.Module,
        held: Mapping[str, torch.Tensor],
        device: torch.device,
        codes: dict[bool, Code],
    ) -> None:
        super().__init__()
        self.training = model.training  # the segment replaces the model's own code
        self.body = _body(model, held, codes)
        self._codes, self._device = codes, device
        self._mode = next(iter(codes))

    def forward(self, *values: Any) -> Any:
        """Runs the part on its inputs' device, in its modules' training mode."""
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
                "evaluation, but only some of these modules, or not the model around "
                "them, are in training; set one mode (pipe.train(), not the model's "
                "own train or eval), or cut between them (split_points=)"
            )
        return self.training

    def _write(self, device: torch.device, mode: bool) -> None:
        """Gives the body the code of a mode, which creates new tensors on a device."""
        for code in self._codes.values():
            place(code.graph, device, self._device)
        self._device, self._mode = device, mode
        self.body.graph = self._codes[mode].graph  # compiles it


@final
class FirstSegment(Segment):
    """The first part, with the arguments of the model's forward."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Runs the part on a batch of any size that is otherwise like the sample."""
        return super().forward(*self.arguments.tensors_of(args, keywords))


@final
class CachedSegment(Segment):
    """A part that accepts `cache=` from `Pipeline.generate`."""

    def forward(self, *values: Any, cache: dict[str, Any], **keywords: Any) -> Any:  # type: ignore[override]
        """Runs the part on new positions that follow the cached ones."""
        return super().forward(*after_past(self.arguments, values, keywords, cache))


def cut_model(
    model: nn.Module,
    points: SplitPoints | None,
    sample: Any,
    omitted: Collection[str] | None = None,
    has_cache: bool = False,
) -> list[nn.Module]:
    """Cuts a model into layers that hold its own modules.

    Args:
        model: any module; it is not modified. If it is cut again, its parts may be on
            several devices.
        points: see `elche.pipeline.pipeline_config.PipelineConfig.split_points`; None
            cuts around the members of its chains of blocks.
        sample: one microbatch of its input.
        omitted: arguments of the sample that are None, when the model is cut again for
            evaluation.
        has_cache: whether layers take a cache, see `elche.pipeline.cutting.caching`.
    """
    if sample is None:
        raise ConfigError(
            f"a {type(model).__name__} is cut by tracing it: give sample=, one "
            "microbatch of its input; or the layers with split=lambda model: [...]"
        )
    if has_cache and not takes_cache(model):
        raise ConfigError("no layer takes cache=")
    choice = at_blocks(model) if points is None else at_points(model, points)
    whole = {id(model.get_submodule(name)): name for name in choice.whole}
    by_mode, given, stand_ins = trace_calls(model, whole, sample, omitted, has_cache)
    made: list[Segment] = []
    for codes in _layers(model, choice, by_mode, has_cache):
        kind = CachedSegment if has_cache else Segment if made else FirstSegment
        made.append(kind(model, stand_ins.held, stand_ins.device, codes))
    made[0].arguments = given
    if code := by_mode.get(True):
        made[0].own_loss = find_own_loss(code.graph, code.output, given)
    if points is not None and len(made) <= len(points):
        raise ConfigError(
            f"the split points {list(points)} cut the model into {len(made)} layers; "
            "expected names of submodules that forward calls, with others before or "
            "between them"
        )
    for name, one in stand_ins.changed().items():
        holders = sum(any(one is each for each in layer.buffers()) for layer in made)
        if holders > 1:
            raise ConfigError(
                f"forward changes the buffer {name} in {holders} layers, because "
                "its module runs more than once; cut so that it runs in one layer "
                "(split_points=), or give each call a module of its own"
            )
    called = {name for one in by_mode.values() for name in _called(one.graph.nodes)}
    for name in choice.whole:
        if name not in called:  # unused by forward, but part of the model's state
            made[-1].body.add_submodule(name, model.get_submodule(name))
    return [*made]


def _layers(
    model: nn.Module, choice: CutChoice, by_mode: dict[bool, Code], is_cached: bool
) -> list[dict[bool, Code]]:
    """Cuts the traces into each layer's codes: one, if both modes have the same."""
    made: list[list[dict[bool, Code]]] = []
    called: list[list[list[str]]] = []
    for mode, one in by_mode.items():
        parts = _parts(one.graph, choice, model)
        ends = _live(one.graph, parts)
        outputs = [None] * (len(parts) - 1) + [one.output]
        graphs = [
            _graph(nodes, ends[i], ends[i + 1], is_cached)
            for i, nodes in enumerate(parts)
        ]
        made.append([{mode: Code(*each)} for each in zip(graphs, outputs, strict=True)])
        called.append([_called(nodes) for nodes in parts])
    if called[0] != called[-1]:
        names = [{name for each in one for name in each} for one in called]
        raise ConfigError(
            "forward calls other submodules in training than in evaluation "
            f"({', '.join(sorted(names[0] ^ names[-1])) or 'in another order'}); "
            f"{REMEDY}"
        )
    both = zip(made[0], made[-1], strict=True)
    return [one if _form(one) == _form(other) else one | other for one, other in both]


def _form(codes: dict[bool, Code]) -> Any:
    """Comparable form of a layer's code in one mode."""
    (code,) = codes.values()
    return texts(code.graph), tree_structure(code.output)


def _parts(graph: fx.Graph, choice: CutChoice, model: nn.Module) -> list[list[fx.Node]]:
    """Nodes of each layer in order.

    A layer begins with a call. Code after a call stays in the call's layer, because it
    may change the call's result in place. Without split points, layers without
    parameters join their neighbours, because no optimizer accepts them.
    """

    def learns(nodes: list[fx.Node]) -> bool:
        named = map(model.get_submodule, _called(nodes))
        return not choice.merges or any(map(has_parameters, named))

    parts: list[list[fx.Node]] = [[]]
    last: str | None = None
    for node in graph.nodes:
        if node.op in _LOCAL:
            continue
        if node.target is call_whole:
            name = str(node.args[0])
            is_end = last is not None and (
                name in choice.before or last in choice.after
            )
            if is_end and learns(parts[-1]):
                parts.append([])
            last = name
        parts[-1].append(node)
    if len(parts) > 1 and not learns(parts[-1]):
        parts[-2:] = [parts[-2] + parts[-1]]
    return parts


def _called(nodes: Iterable[fx.Node]) -> list[str]:
    """Names of the submodules that a layer calls, in order."""
    return [str(one.args[0]) for one in nodes if one.target is call_whole]


def _live(graph: fx.Graph, parts: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Live values at the boundaries of layers, including the input and the output."""
    number = {node: index for index, nodes in enumerate(parts) for node in nodes}
    last = {
        node: max((number.get(user, len(parts) - 1) for user in node.users), default=-1)
        for node in graph.nodes
        if node.op not in ("get_attr", "output")
    }
    between = [
        [node for node in last if number.get(node, -1) < index <= last[node]]
        for index in range(1, len(parts))
    ]
    *_, output = graph.nodes
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [inputs, *between, list(output.args[0])]


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
            here[node].meta = {}  # else it keeps the trace alive
    graph.output(tuple(fx.node.map_arg(list(outputs), mapped)))
    return graph


def _body(
    model: nn.Module, held: Mapping[str, torch.Tensor], codes: Mapping[bool, Code]
) -> fx.GraphModule:
    """Module with the model's own submodules and tensors that a layer's codes use."""
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
