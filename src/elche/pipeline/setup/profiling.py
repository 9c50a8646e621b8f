"""Measured layer times on this rank's device, within a time budget.

A layer is timed as it will run, through
`elche.pipeline.split_backward.backward.StageBackward`: with deferred weight gradients,
and unsplit. If its weight gradients cannot be deferred, or deferral costs too much, its
backward runs unsplit. The plan (`elche.pipeline.setup.measured_plan`) then counts the
whole backward as I. A layer of the same structure as a measured one is not measured.

On the CPU, a layer's time is its CPU time, scaled by the ratio of wall time to CPU time
over all measurements. A cgroup's quota stops a process for up to 0.1 s at a time: in
wall time a layer of a few milliseconds may look many times slower.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median
from typing import Any, TypeAlias, final

import torch
from torch import nn

from elche.comm.transport.message_memory import IncomingMemory, OutgoingMemory
from elche.comm.transport.messages import Message, Packed
from elche.comm.transport.shared_memory import may_share_memory
from elche.devices import random_state
from elche.devices.streams import synchronize
from elche.pipeline.setup.building import LayerList
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import Layer, OwnBackward, Stage
from elche.pipeline.trees import as_plain, as_tensors, flatten
from elche.runtime.emulation import EmulationConfig
from elche.schedule.planning.profile import LayerTimes

logger = logging.getLogger(__name__)

BUDGET_S = 3.0
"""Time (s) for all measurements, in addition to one microbatch through each layer."""
SHARERS = 4
"""Most layers that share the remaining budget: many layers are alike."""
SAME_TIMES = 1.15
"""Largest ratio between times of layers that count as equal."""
WARM_RUNS = 1
RUNS = 3
UNDER_WAY = 4
"""Most microbatches in flight while a layer is timed."""
MOST_TURNS = 4
TURNS_BYTES = 64 * 2**20
"""Most parameter bytes of a layer and its copies, which are timed in turn.

The copies evict a layer's parameters from the caches, as a stage's other layers do in a
step. Larger parameters do not stay in the caches anyway.
"""
MOST_SPLIT_COST = 1.05
"""Largest ratio of F + I + W to F + B at which a layer is still split."""
LOG_EVERY_S = 5.0
_LEAST_S = 1e-9
_NOTHING = contextlib.nullcontext()
_PassMessage: TypeAlias = Callable[[Message], None]
"""Function that sends a message to this rank and receives it."""
_WALL, _CPU, _PARTS = 0, 4, 4
"""First column of wall times and of CPU times, each for F, I, W, half a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement(LayerTimes):
    """Measurements of one layer on one device, for one microbatch.

    An unsplit layer has no W; its I is the whole B.

    Attributes:
        activation_bytes: bytes that forward keeps for backward, without parameters.
        output_bytes: size of the message to the next layer.
        parameter_bytes: size of the parameters.
    """

    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0


def profile_layers(
    layers: LayerList,
    sample: Any,
    device: torch.device,
    emulation: EmulationConfig | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> list[LayerMeasurement]:
    """Times forward, input gradient and weight gradient of each layer.

    Takes `BUDGET_S`, plus one run of each layer (two of the first one). Layers are
    copied, or built from their factories, one at a time: the device never holds more
    than one layer, or a few copies of a small one. Modules and torch's random numbers
    do not change.

    Args:
        layers: layers of the model.
        sample: one microbatch of the first layer's input.
        device: device to measure on.
        emulation: speed of an emulated device, per layer.
        report: callback for the progress after each computation; "" at the end.
    """
    tensors, structure = flatten(as_tensors(sample, "the sample"), "the sample")
    given = Message(tuple(tensors), structure, (False,) * len(tensors))
    with random_state.forked([device]), _message_path(device) as pass_message:
        profiler = _Profiler(layers, device, emulation, report, pass_message)
        for index in range(len(layers)):
            given = profiler.measure(index, given)
    report("")
    return profiler.result()


@final
class _Profiler:
    """A measurement in progress; most arguments as in `profile_layers`."""

    def __init__(
        self,
        layers: LayerList,
        device: torch.device,
        emulation: EmulationConfig | None,
        report: Callable[[str], None],
        pass_message: _PassMessage | None,
    ) -> None:
        self._found: list[tuple[LayerMeasurement, int]] = []  # and its clock
        self._layers, self._device, self._emulation = layers, device, emulation
        self._publish, self._pass_message = report, pass_message
        self._text, self._runs = "", 0
        self._known: list[tuple[object, float, tuple[LayerMeasurement, int]]] = []
        self._spent_s, self._clock, self._sleeps = [0.0, 0.0], _WALL, 0
        self._begin_s = self._logged_s = time.perf_counter()

    def measure(self, index: int, given: Message) -> Message:
        """Measures a layer; returns its output."""
        moved = tuple(one.to(self._device) for one in given.tensors)
        layer, given = self._copy_of(index), replace(given, tensors=moved)
        rest, spent_s = len(self._layers) - index, time.perf_counter() - self._begin_s
        expected_s = max(BUDGET_S - spent_s, spent_s / max(1, index) * rest)
        self._text = f"{index} of {index + rest} layers, {expected_s:.0f} s left"
        structure = _structure(layer.module, given)
        split, row = self._runner(layer, True), tuple([math.inf] * 2 * _PARTS)
        for probe in range(2):  # the first one warms up and may be disturbed
            saved: dict[int, int] = {}
            again, output = self._timed([split], given, 1, _counting(layer, saved))
            if index == probe == 0:  # torch imports a lot in its first backward
                self._begin_s, self._spent_s = time.perf_counter(), [0.0, 0.0]
            row = min(row, again, key=sum)
            spent_s = time.perf_counter() - self._begin_s
            run_s = max(_LEAST_S, sum(row[_WALL : _WALL + 3]))
            own_s = max(_LEAST_S, sum(row[self._clock : self._clock + 3]))
            for known, known_s, found in self._known:
                ratio = own_s / known_s
                if known == structure and 1 / SAME_TIMES < ratio < SAME_TIMES:
                    self._found.append(found)
                    return output
            if spent_s + run_s > BUDGET_S:
                break
        budget_s = (BUDGET_S - spent_s) / min(rest, SHARERS)
        rows: list[tuple[float, ...]] = [(*row, *row)]
        if 2 * run_s < budget_s:
            rows = self._rows(layer, index, given, budget_s, run_s)
        sizes = sum(saved.values()), sum(one.nbytes for one in output.tensors)
        by_part = list(zip(*rows, strict=True))
        both = (
            by_part[self._clock + at : self._clock + at + _PARTS]
            for at in (0, 2 * _PARTS)
        )
        columns = list(chain.from_iterable(both))
        found = _measurement(columns, layer, split.deferred > 0, *sizes), self._clock
        self._known.append((structure, own_s, found))
        self._found.append(found)
        return output

    def result(self) -> list[LayerMeasurement]:
        """Measurements of the layers, scaled to wall time."""
        wall_s, cpu_s = (max(_LEAST_S, spent_s) for spent_s in self._spent_s)
        scales = {_WALL: 1.0, _CPU: wall_s / cpu_s}
        return [_scaled(one, scales[clock]) for one, clock in self._found]

    def _rows(
        self, layer: Layer, index: int, given: Message, budget_s: float, run_s: float
    ) -> list[tuple[float, ...]]:
        """Times of runs with split and with whole backward, within the budget."""
        microbatches = max(1, int(budget_s / (2 * RUNS * run_s)))  # per run
        under_way = min(UNDER_WAY, microbatches)
        size_bytes = max(1, sum(one.nbytes for one in layer.module.parameters()))
        fitting = min(MOST_TURNS, len(self._layers), TURNS_BYTES // size_bytes)
        copies = max(1, min(fitting, microbatches // under_way))
        turns = [layer, *(self._copy_of(index) for _ in range(copies - 1))]
        split, whole = ([self._runner(t, s) for t in turns] for s in (True, False))
        rows, end_s = list[tuple[float, ...]](), time.perf_counter() + budget_s
        while len(rows) < WARM_RUNS + RUNS:
            begin_s = time.perf_counter()
            both = (self._timed(one, given, under_way)[0] for one in (split, whole))
            rows.append(tuple(chain.from_iterable(both)))
            if 2 * time.perf_counter() - begin_s > end_s:
                break
        return rows[WARM_RUNS:] or rows

    def _copy_of(self, index: int) -> Layer:
        """Separate copy of a layer to measure; a meta layer is filled with zeros."""
        layers, device = self._layers, self._device
        source = layers.sources[index]
        if not isinstance(source, nn.Module):
            return layers.build([index], device, None)[index]
        held = (*source.parameters(), *source.buffers())
        copied = copy.deepcopy(source)
        if any(one.is_meta for one in held):
            copied.to_empty(device=device)
            with torch.no_grad():
                for one in (*copied.parameters(), *copied.buffers()):
                    one.zero_()
        return Layer(layers.names[index], copied.to(device))

    def _runner(self, layer: Layer, splits: bool) -> StageBackward:
        stage = Stage(0, [layer], self._layers.unpacks)
        return StageBackward(stage, None, splits, self._emulation)

    def _timed(
        self,
        turns: Sequence[StageBackward],
        given: Message,
        under_way: int,
        counting: contextlib.AbstractContextManager[object] = _NOTHING,
    ) -> tuple[tuple[float, ...], Message]:
        """Mean times of F, I, W and half a message; and the output.

        Conditions are those of a step. Activations have left the caches before their
        backward, each forward allocates new memory, and other layers have run since a
        layer's parameters were read.
        """
        for runner in turns:
            runner.begin_step()
        took_s: list[list[float]] = [[] for _ in range(2 * _PARTS)]
        self._sleeps = 0
        for microbatch in range(under_way):
            for runner in turns:
                begin = self._now()
                with counting:
                    value = runner.forward(microbatch, given, {}, True)
                message = runner.keep(microbatch, as_plain(value))
                begin = self._lap(took_s, 0, begin)
                if self._pass_message is not None:
                    self._pass_message(message)
                    self._lap(took_s, 3, begin)
                self._report()
        needed = zip(message.tensors, message.needs_grad, strict=True)
        gradients = [torch.ones_like(one) for one, is_needed in needed if is_needed]
        for microbatch in range(under_way):
            for runner in reversed(turns):
                begin = self._now()
                runner.backward_input(microbatch, gradients)
                begin = self._lap(took_s, 1, begin)
                runner.backward_weight(microbatch)
                self._lap(took_s, 2, begin)
                self._report()
        # CPU time misses the time in which a layer sleeps, for I/O or its threads.
        does_sleep = self._sleeps >= under_way * len(turns)
        laps = zip(chain(*took_s[:_CPU]), chain(*took_s[_CPU:]), strict=True)
        is_coarse = any(wall_s > 0 == cpu_s for wall_s, cpu_s in laps)
        is_wall = does_sleep or is_coarse or self._device.type != "cpu"
        self._clock = _WALL if is_wall else _CPU
        if self._clock == _CPU:
            self._spent_s[0] += sum(map(sum, took_s[:_CPU]))
            self._spent_s[1] += sum(map(sum, took_s[_CPU:]))
        for ends in took_s[3::_PARTS]:
            ends[:] = [one / 2 for one in ends] or [0.0]
        return tuple(map(fmean, took_s)), message

    def _now(self) -> tuple[float, float, int]:
        """Wall time (s), CPU time (s) and number of sleeps so far."""
        synchronize(self._device)
        return time.perf_counter(), time.thread_time(), _sleeps()

    def _lap(
        self, took_s: list[list[float]], part: int, begin: tuple[float, float, int]
    ) -> tuple[float, float, int]:
        """Adds the times since `begin` to a part of a row; returns the times now."""
        now = self._now()
        took_s[_WALL + part].append(now[0] - begin[0])
        took_s[_CPU + part].append(now[1] - begin[1])
        self._sleeps += now[2] - begin[2]
        return now

    def _report(self) -> None:
        self._runs += 1
        self._publish(f"{self._text}, run {self._runs}")
        if time.perf_counter() - self._logged_s > LOG_EVERY_S:
            self._logged_s = time.perf_counter()
            logger.info("measuring on %s: %s", self._device, self._text)


def _sleeps() -> int:
    """Number of voluntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _scaled(one: LayerMeasurement, scale: float) -> LayerMeasurement:
    return replace(
        one,
        forward_s=one.forward_s * scale,
        input_gradient_s=one.input_gradient_s * scale,
        weight_gradient_s=one.weight_gradient_s * scale,
        backward_s=one.full_backward_s * scale,
        message_s=one.message_s * scale,
    )


def _measurement(
    columns: Sequence[Sequence[float]],
    layer: Layer,
    is_deferred: bool,
    activation_bytes: int,
    output_bytes: int,
) -> LayerMeasurement:
    times = [max(_LEAST_S, median(column)) for column in columns]
    forward_s, input_s, weight_s, _, whole_s, *backward, message_s = times
    # Other load on the machine only adds to a time, so compare minima.
    least = [max(_LEAST_S, min(column)) for column in columns]
    is_put_off = is_deferred and sum(least[:3]) <= MOST_SPLIT_COST * sum(least[4:7])
    if not is_put_off and not isinstance(layer.module, OwnBackward):
        forward_s, input_s, weight_s = whole_s, sum(backward), 0.0
    return LayerMeasurement(
        forward_s=forward_s,
        input_gradient_s=input_s,
        weight_gradient_s=weight_s,
        backward_s=sum(backward),
        message_s=message_s,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        parameter_bytes=sum(one.nbytes for one in layer.module.parameters()),
    )


def _structure(module: nn.Module, given: Message) -> object:
    """Types of a layer's modules; types or shapes of input, parameters and buffers."""
    held = (*module.parameters(), *module.buffers(), *given.tensors)
    return (
        [(type(one), one.training) for one in module.modules()],
        [(one.shape, one.dtype, one.requires_grad) for one in held],
    )


@contextlib.contextmanager
def _message_path(device: torch.device) -> Iterator[_PassMessage | None]:
    """Shared-memory path from this rank to itself; None if ranks have no such path."""
    into: IncomingMemory | None = None
    with contextlib.ExitStack() as stack:
        if device.type == "cpu" and may_share_memory():
            with contextlib.suppress(OSError):
                out = stack.enter_context(contextlib.closing(OutgoingMemory()))
                into = IncomingMemory.open(out.offer)
        if into is None:
            yield None
            return
        stack.callback(into.close)

        def pass_message(message: Message) -> None:
            out.send(0, Packed(message))
            for _ in into.read():
                pass

        yield pass_message


def _counting(
    layer: Layer, saved: dict[int, int]
) -> contextlib.AbstractContextManager[object]:
    """Context in which forward records the bytes of saved storages, by address."""
    held = (*layer.module.parameters(), *layer.module.buffers())
    own = {one.untyped_storage().data_ptr() for one in held}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
