"""Trace of a model's forward between its submodules, by torch's own tracer.

`make_fx` runs forward once on fake tensors with symbolic sizes, as torch.export and
torch.distributed.pipelining do. Each uncut submodule is a single call: it remains the
user's own module, with its name, hooks, mode and random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from elche.errors import ConfigError
from elche.pipeline.cutting.arguments import REMEDY, Arguments
from elche.pipeline.cutting.between import settle
from elche.pipeline.cutting.caching import cached_arguments, traced_forward
from elche.pipeline.cutting.stand_ins import StandIns
from elche.pipeline.cutting.whole_calls import ModuleCalls
from elche.pipeline.stage import modes_kept
from elche.torch_internals.batches import tree_leaves, tree_map


@final
@dataclass(frozen=True)
class Code:
    """Traced code of a model, or of a layer, in one mode.

    Attributes:
        graph: the code, with a node for each call of an uncut submodule.
        output: structure of the model's output, with placeholder tensors; only for the
            model and its last layer, else None.
    """

    graph: fx.Graph
    output: Any = None


def trace_calls(
    model: nn.Module,
    whole: Mapping[int, str],
    sample: Any,
    omitted: Collection[str] | None = None,
    has_cache: bool = False,
) -> tuple[dict[bool, Code], Arguments, StandIns]:
    """Traces a model in training and in evaluation, or again in evaluation alone.

    The model is not modified. `whole` has the name of each uncut submodule, by id;
    other arguments as in `elche.pipeline.cutting.segments.cut_model`.

    Returns:
        The code in training (True) and in evaluation, the arguments of the traced
        forward, and the model's tensors in the trace.
    """
    device = _device_of(model, may_differ=omitted is not None)
    read = cached_arguments if has_cache else Arguments.read
    arguments = read(model, sample, device, omitted or ())
    stand_ins = StandIns(model, arguments.tensors, device)
    fakes, mode = stand_ins.inputs, stand_ins.mode
    symbols = [[expression(size) for size in fake.shape] for fake in fakes]
    watch = ModuleCalls(model, whole, stand_ins)
    outputs: list[Any] = []

    def forward(*tensors: torch.Tensor) -> list[Any]:
        # Patched inside forward, after the tracer has installed its own hook.
        with watch.patched(), stand_ins.patched():
            given = arguments.filled(tensors)
            found = traced_forward(model, given) if has_cache else model(**given)
            outputs.append(found)
        return tree_leaves(outputs[-1])

    codes: dict[bool, Code] = {}
    nothing = torch.empty(0, device="cpu")
    for is_training in (True, False) if omitted is None else (False,):
        with modes_kept([model]), _refusing(watch), torch.enable_grad(), mode:
            model.train(is_training)
            made = make_fx(forward, pre_dispatch=True)(*fakes)
        graph = settle(made, stand_ins.names)
        output = tree_map(lambda one: nothing, outputs[-1])
        codes[is_training] = Code(graph, output)
    sizes = [[expression(size) for size in fake.shape] for fake in fakes]
    guards = [one.expr for one in mode.shape_env.guards]
    if not arguments.learn(symbols, sizes, guards, has_cache):
        raise ConfigError(
            f"forward of {type(model).__name__} works only for {arguments.samples} "
            f"samples, as many as sample= has; compute the number from the input's "
            "shape, or cut by hand with split=lambda model: [...]"
        )
    return codes, arguments, stand_ins


def _device_of(model: nn.Module, may_differ: bool) -> torch.device:
    """Device of a model; meta if `may_differ` and its parts are on several devices."""
    devices = [one.device for one in (*model.parameters(), *model.buffers())]
    device = devices[0] if devices else torch.device("cpu")
    if device.type == "meta":  # computed buffers may already have values
        devices = [one.device for one in model.parameters()]
    other = next((one for one in devices if one != device), None)
    if other is None:
        return device
    if may_differ:
        return torch.device("meta")
    remedy = "move it to one device, the pipeline moves each rank's part to its own"
    if "meta" in (device.type, other.type):
        remedy = (
            "build all of it on the meta device, and load the weights into the "
            'pipeline (init="load", then pipe.load or pipe.load_state_dict)'
        )
    raise ConfigError(f"the model is on {device} and on {other}; {remedy}")


@contextmanager
def _refusing(calls: ModuleCalls) -> Iterator[None]:
    """Adds the failing module's name to errors of the tracer."""
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


def expression(size: Any) -> Any:
    """A size of a traced tensor: a number, or an expression of symbols."""
    return size if isinstance(size, int) else size.node.expr
