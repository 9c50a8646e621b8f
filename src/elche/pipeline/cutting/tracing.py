"""Trace of a model's forward between its submodules, by torch's own tracer.

`make_fx` runs forward once on fake tensors with symbolic sizes, as torch.export and
torch.distributed.pipelining do. Each uncut submodule is a single call: it remains the
user's own module, with its name, hooks, mode and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.cutting.caching import cached_arguments, traced_forward
from elche.pipeline.cutting.whole_calls import REMEDY, ModuleCalls, call_whole
from elche.pipeline.stage import modes_kept
from elche.torch_internals.batches import tree_leaves, tree_map
from elche.torch_internals.held import held_buffers, held_parameters, version
from elche.torch_internals.passes import FakeTensorMode


@final
@dataclass(frozen=True)
class CallTrace:
    """Trace of a forward between the uncut submodules.

    Attributes:
        graph: graph with a node of :func:`call_whole` for each submodule call; returns
            the output's tensors in a list.
        used: parameters and buffers used by the traced code, by the graph's names; None
            for a constant that forward makes.
        changed: buffers that forward changes in training, by the model's names.
        arguments: arguments of the traced forward.
        output: structure of forward's output, with placeholder tensors.
        device: device of the trace.
        is_cached: whether modules receive a cache, as `CACHE_MARK`.
    """

    graph: fx.Graph
    used: dict[str, torch.Tensor | None]
    changed: dict[str, torch.Tensor]
    arguments: Arguments
    output: Any
    device: torch.device
    is_cached: bool = False


def trace_calls(model: nn.Module, whole: Mapping[int, str], sample: Any) -> CallTrace:
    """Traces a model.

    Args:
        model: the user's model, possibly on the meta device; it is not modified.
        whole: name of each uncut submodule, by id.
        sample: one microbatch of its input.

    Raises:
        ConfigError: the code between the submodules cannot be traced, or differs
            between training and evaluation.
    """
    device = _device_of(model)
    with modes_kept([model]):
        found, evaluated = (
            _trace(model.train(mode), whole, Arguments.read(model, sample, device))
            for mode in (True, False)
        )
    _compare(found.graph, evaluated.graph)
    return found


def trace_cached(model: nn.Module, whole: Mapping[int, str], sample: Any) -> CallTrace:
    """Traces a model in evaluation, with a cache of keys and values of any length.

    Args:
        model: see `elche.pipeline.cutting.caching.has_cache`; its parts may be on
            several devices.
        whole: as in `trace_calls`.
        sample: as in `trace_calls`.

    Raises:
        ConfigError: the code between the submodules cannot be traced.
    """
    devices = {one.device for one in (*model.parameters(), *model.buffers())}
    device = devices.pop() if len(devices) == 1 else torch.device("meta")
    with modes_kept([model]):
        arguments = cached_arguments(model, sample, device)
        return _trace(model.eval(), whole, arguments, is_cached=True)


def _device_of(model: nn.Module) -> torch.device:
    held = [*model.parameters(), *model.buffers(), torch.empty(0, device="cpu")]
    device = held[0].device
    other = next((one.device for one in held[:-1] if one.device != device), device)
    if other != device:
        raise ConfigError(
            f"the model is on {device} and on {other}; move it to one device, the "
            "pipeline moves each rank's part to its own"
        )
    return device


def _trace(
    model: nn.Module,
    whole: Mapping[int, str],
    arguments: Arguments,
    is_cached: bool = False,
) -> CallTrace:
    device = arguments.device
    shapes = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes)
    stand_ins = _StandIns(model, mode, device)
    fakes = [mode.from_tensor(one, symbolic_context=_dynamic(one)) for one in arguments]
    symbols = [[_expression(size) for size in fake.shape] for fake in fakes]
    outputs: list[Any] = []
    watch = ModuleCalls(model, whole)

    def forward(*tensors: torch.Tensor) -> list[Any]:
        # Patched inside forward: the tracer has installed its own hook before.
        with watch.patched(), stand_ins.patched():
            given = arguments.filled(tensors)
            found = traced_forward(model, given) if is_cached else model(**given)
            outputs.append(found)
        return tree_leaves(outputs[-1])

    with _refusing(watch), torch.enable_grad(), mode:
        made = make_fx(forward, pre_dispatch=True)(*fakes)
    sizes = [[_expression(size) for size in fake.shape] for fake in fakes]
    fixed = [[_number(size) for size in row] for row in sizes]
    if _number(arguments.learn_dimensions(sizes)) is not None:
        raise ConfigError(
            f"forward of {type(model).__name__} fixes the number of samples at that of "
            f"the sample, {arguments.samples}; compute it from the input's shape, or "
            "cut by hand with split=lambda model: [...]"
        )
    _drop_empty_modes(made.graph)
    # No guard holds for a cache's length and the new positions (later just one).
    guards = [] if is_cached else [one.expr for one in shapes.guards]
    arguments.learn_sizes(symbols, fixed, guards)
    nothing = torch.empty(0, device="cpu")
    return CallTrace(
        graph=made.graph,
        used=stand_ins.used(made),
        changed=stand_ins.changed(),
        arguments=arguments,
        output=tree_map(lambda one: nothing, outputs[-1]),
        device=device,
        is_cached=is_cached,
    )


@contextmanager
def _refusing(calls: ModuleCalls) -> Iterator[None]:
    """Adds the failing module's name to errors of the tracer.

    Raises:
        ConfigError: tracing failed.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first}"
        if isinstance(error, GuardOnDataDependentSymNode):
            reason = f"values of tensors decide what runs ({reason})"
        elif "SymFloat" in first or "node.constant" in first:
            reason = "it reads a number from a tensor, as item() does; keep the tensor"
        else:
            reason += "; first check that the model runs on the sample"
        raise ConfigError(
            f"forward of {calls.inside} cannot be traced with this sample: {reason}; "
            f"{REMEDY}"
        ) from error


@final
class _StandIns:
    """Fake tensors for parameters and buffers, so that forward changes no real ones.

    BatchNorm, for example, counts its batches.

    Args:
        model: model with the real tensors.
        mode: fake tensor mode.
        device: device of the fake tensors.
    """

    def __init__(
        self, model: nn.Module, mode: FakeTensorMode, device: torch.device
    ) -> None:
        self._model = model
        self._named = dict((*model.named_parameters(), *model.named_buffers()))
        self._fakes = {
            id(one): mode.from_tensor(
                one if one.device == device else torch.empty_like(one, device=device),
                static_shapes=True,
            )
            for one in self._named.values()
        }
        self._versions = {key: version(fake) for key, fake in self._fakes.items()}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Puts the fake tensors into the model, and restores the real ones afterwards.

        `torch.func.functional_call` would leave them in a module that is used twice.
        """
        slots = [
            (held, name, one)
            for module in self._model.modules()
            for held in (held_parameters(module), held_buffers(module))
            for name, one in held.items()
            if one is not None
        ]
        try:
            for held, name, one in slots:
                held[name] = self._fakes[id(one)]
            yield
        finally:
            for held, name, one in slots:
                held[name] = one

    def used(self, made: fx.GraphModule) -> dict[str, torch.Tensor | None]:
        """Tensors used by a trace, by name; None for its own constants."""
        real = {id(self._fakes[id(one)]): one for one in self._named.values()}
        names = [node.target for node in made.graph.nodes if node.op == "get_attr"]
        return {name: real.get(id(getattr(made, name))) for name in names}

    def changed(self) -> dict[str, torch.Tensor]:
        """Tensors that forward has written to, by the model's names."""
        return {
            name: one
            for name, one in self._named.items()
            if version(self._fakes[id(one)]) != self._versions[id(one)]
        }


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _number(expression: Any) -> int | None:
    """The number that a size became in a trace; None if it is still symbolic."""
    is_number = isinstance(expression, int) or expression.is_number
    return int(expression) if is_number else None


def _dynamic(tensor: torch.Tensor) -> StatelessSymbolicContext[Any, Any]:
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())


def _drop_empty_modes(graph: fx.Graph) -> None:
    """Drops switches of no_grad or autocast around calls of uncut modules.

    The modules set the switches themselves when they run.

    Raises:
        ConfigError: there is traced code between two switches.
    """
    while True:
        nodes = list(graph.nodes)
        pairs = [
            (one, other)
            for one, other in pairwise(nodes)
            if _switches(one) and _switches(other)
        ]
        if not pairs:
            break
        for node in reversed(pairs[0]):
            graph.erase_node(node)
    left = next((one for one in graph.nodes if _switches(one)), None)
    if left is not None:
        raise ConfigError(
            f"forward uses {left.target!s} around code {where(left)}, which a cut "
            f"might tear apart; {REMEDY}"
        )


def _switches(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name.endswith(
        ("set_grad_enabled", "enter_autocast", "exit_autocast")
    )


def _compare(trained: fx.Graph, evaluated: fx.Graph) -> None:
    """Raises unless both graphs are the same.

    Raises:
        ConfigError: they differ; the message names the submodules around the
            difference.
    """
    rows = [_texts(graph) for graph in (trained, evaluated)]
    if rows[0] == rows[1]:
        return
    nodes = list(trained.nodes)
    at = next(
        (i for i, (a, b) in enumerate(zip(*rows, strict=False)) if a != b),
        min(map(len, rows)) - 1,
    )
    raise ConfigError(
        f"forward differs between training and evaluation {where(nodes[at])} "
        f"({nodes[at].name}), such as dropout as a function: make it a module "
        f"(nn.Dropout); {REMEDY}"
    )


def _texts(graph: fx.Graph) -> list[str]:
    """Texts of a graph's nodes, with nodes numbered, since names may differ."""
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    return [
        str(fx.node.map_arg((str(one.target), one.args, one.kwargs), number.get))
        for one in graph.nodes
    ]


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
