"""Measured layer times on this rank's device, within a time budget.

A layer is timed as it will run: through
`elche.pipeline.split_backward.backward.StageBackward`, with deferred weight gradients,
and unsplit. If its weight gradients cannot be deferred, or deferral costs too much, its
backward runs unsplit. The plan (`elche.pipeline.setup.measured_plan`) then counts all
of it as I, without W.

First every layer runs one microbatch, whatever it takes. Layers of one structure whose
times agree are of one kind. Then each kind is measured more exactly, as far as the
budget allows.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
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
"""Time (s) for all measurements of a rank, beyond one run of each layer."""
PROBES = 2
"""Runs of a layer that is of no known kind; the first one also warms up."""
SAME_TIMES = 1.15
"""Largest ratio of the times of two layers of one kind."""
WARM_RUNS = 1
UNDER_WAY = 4
"""Largest number of microbatches in flight while a layer is timed."""
MOST_TURNS = 4
TURNS_BYTES = 64 * 2**20
"""Most parameter bytes of a layer and its copies that are timed in turn.

In a step, the other layers of the stage evict a layer's parameters from the caches.
Larger parameters do not stay in the caches anyway.
"""
RUNS = 3
LOG_EVERY_S = 5.0
_LEAST_S = 1e-9
_NOTHING = contextlib.nullcontext()
MOST_SPLIT_COST = 1.05
"""Largest ratio of F + I + W to F + B at which a layer is still split."""

_Row: TypeAlias = tuple[float, float, float, float]
"""Mean seconds of F, I, W and one end of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement(LayerTimes):
    """Measurements of one layer on one device, for one microbatch.

    An unsplit layer has no W; its I is all of B.

    Attributes:
        activation_bytes: bytes that forward keeps for backward, without parameters.
        output_bytes: size of the message to the next layer.
        parameter_bytes: size of the parameters.
    """

    activation_bytes: int
    output_bytes: int
    parameter_bytes: int


def profile_layers(
    layers: LayerList,
    sample: Any,
    device: torch.device,
    emulation: EmulationConfig | None = None,
    report: Callable[[str], None] | None = None,
) -> list[LayerMeasurement]:
    """Times forward, input gradient and weight gradient of each layer.

    Takes the time of one microbatch, of the first layer's first run, and `BUDGET_S`. Layers are copied, or built from
    their factories, one at a time. Neither modules nor torch's random numbers change,
    and the device never holds more than one layer, or a few copies of a small one.

    Args:
        layers: layers of the model.
        sample: one microbatch of the first layer's input.
        device: device to measure on.
        emulation: speed of an emulated device, for one layer.
        report: called after each computation with the progress; "" at the end.

    Raises:
        ConfigError: a layer cannot be built, or returns no tensor.
    """
    tensors, structure = flatten(as_tensors(sample, "the sample"), "the sample")
    given = Message(tuple(tensors), structure, (False,) * len(tensors))
    profiler = _Profiler(layers, device, emulation, report)
    with random_state.forked([device]), contextlib.closing(profiler.loop):
        for index in range(len(layers)):
            given = profiler.probe(index, given)
        profiler.refine()
    if report is not None:
        report("")
    return [kind.found for kind in profiler.kind_of]


@dataclass
class _Kind:
    """Layers of one structure and of about the same times.

    Attributes:
        key: structure of the layers, and shapes of their input.
        index: index of the first of them.
        given: its input, on the CPU.
        found: measurements so far.
    """

    key: object
    index: int
    given: Message
    found: LayerMeasurement

    @property
    def run_s(self) -> float:
        """Time of one microbatch."""
        return self.found.forward_s + self.found.full_backward_s


@final
class _Profiler:
    """A measurement in progress; arguments as in `profile_layers`.

    Attributes:
        loop: path of messages from this rank to itself.
        kind_of: kind of each layer that has run.
    """

    def __init__(
        self,
        layers: LayerList,
        device: torch.device,
        emulation: EmulationConfig | None,
        report: Callable[[str], None] | None,
    ) -> None:
        self.loop, self.kind_of = _Loop(device), list[_Kind]()
        self._layers, self._device, self._emulation = layers, device, emulation
        self._publish, self._text = report, ""
        self._begin_s = self._logged_s = time.perf_counter()

    @property
    def _left_s(self) -> float:
        return self._begin_s + BUDGET_S - time.perf_counter()

    def probe(self, index: int, given: Message) -> Message:
        """Runs one microbatch through a layer; returns the output."""
        count, spent_s = len(self._layers), BUDGET_S - self._left_s
        self._text = f"layer {index + 1} of {count}"
        if index:
            rest_s = max(self._left_s, spent_s / index * (count - index))
            self._text += f", about {rest_s:.0f} s left"
        layer, given = self._copy_of(index), _on(given, self._device)
        form = [(one.shape, one.dtype) for one in given.tensors]
        key = (_structure(layer.module), form)
        alike = [kind for kind in self.kind_of if kind.key == key]
        (runner,), row = self._runners([layer], True), (math.inf,) * 4
        for _ in range(PROBES):
            saved: dict[int, int] = {}
            again, output = self._timed([runner], given, 1, _counting(layer, saved))
            if not self.kind_of and math.isinf(row[0]):
                self._begin_s = time.perf_counter()  # torch's first backward imports
            row = min(row, again, key=sum)
            close = [one for one in alike if _are_close(one.run_s, sum(row[:3]))]
            if close or sum(row) > self._left_s:
                break
        forward_s, input_s, weight_s, message_s = (max(_LEAST_S, one) for one in row)
        if not runner.deferred and not isinstance(layer.module, OwnBackward):
            input_s, weight_s = input_s + weight_s, 0.0
        found = LayerMeasurement(
            forward_s=forward_s,
            input_gradient_s=input_s,
            weight_gradient_s=weight_s,
            message_s=message_s * self.loop.is_open,
            activation_bytes=sum(saved.values()),
            output_bytes=sum(one.nbytes for one in output.tensors),
            parameter_bytes=sum(one.nbytes for one in layer.module.parameters()),
        )
        kind = _Kind(key, index, _on(given, torch.device("cpu")), found)
        self.kind_of.append(close[0] if close else kind)
        return output

    def refine(self) -> None:
        """Measures each kind of layers for its share of the remaining budget."""
        kinds = list({kind.index: kind for kind in self.kind_of}.values())
        for number, kind in enumerate(kinds):
            left_s, rest = max(0.0, self._left_s), len(kinds) - number
            self._text = f"{rest} kinds of layers again, at most {left_s:.0f} s left"
            self._refine(kind, left_s / rest)
        logger.info(
            "measured %d layers of %d kinds on %s in %.1f s",
            *(len(self._layers), len(kinds), self._device, BUDGET_S - self._left_s),
        )

    def _refine(self, kind: _Kind, budget_s: float) -> None:
        """Times a kind of layers with other layers and microbatches in between."""
        microbatches = budget_s / (2 * kind.run_s)
        if microbatches < 1:
            return
        microbatches = max(1.0, microbatches / RUNS)  # of a run
        under_way = min(UNDER_WAY, int(microbatches))
        most_copies = TURNS_BYTES // max(1, kind.found.parameter_bytes)
        copies = min(MOST_TURNS, len(self._layers), most_copies)
        copies = max(1, min(copies, int(microbatches / under_way)))
        turns = [self._copy_of(kind.index) for _ in range(copies)]
        given, rows = _on(kind.given, self._device), list[tuple[float, ...]]()
        split, whole = self._runners(turns, True), self._runners(turns, False)
        end_s = time.perf_counter() + budget_s
        while len(rows) < WARM_RUNS + RUNS:
            begin_s = time.perf_counter()
            both = (self._timed(one, given, under_way)[0] for one in (split, whole))
            rows.append(tuple(chain.from_iterable(both)))
            if 2 * time.perf_counter() - begin_s > end_s:
                break
        columns = list(zip(*(rows[WARM_RUNS:] or rows), strict=True))
        times = [max(_LEAST_S, median(column)) for column in columns]
        forward_s, input_s, weight_s, _, whole_s, *backward, message_s = times
        backward_s = sum(backward)
        # Other load on the machine only adds to a time, so compare minima.
        least = [max(_LEAST_S, min(column)) for column in columns]
        split_cost = sum(least[:3]) / sum(least[4:7])
        is_put_off = split[0].deferred > 0 and split_cost <= MOST_SPLIT_COST
        if not is_put_off and not isinstance(turns[0].module, OwnBackward):
            forward_s, input_s, weight_s = whole_s, backward_s, 0.0
        kind.found = replace(
            kind.found,
            forward_s=forward_s,
            input_gradient_s=input_s,
            weight_gradient_s=weight_s,
            backward_s=backward_s,
            message_s=message_s * self.loop.is_open,
        )

    def _copy_of(self, index: int) -> Layer:
        """Separate copy of a layer to measure; a meta layer is filled with zeros."""
        layers, device = self._layers, self._device
        source = layers.sources[index]
        if not isinstance(source, nn.Module):
            return layers.build([index], device, None, None)[0]
        held = (*source.parameters(), *source.buffers())
        copied = copy.deepcopy(source)
        if any(one.is_meta for one in held):
            copied.to_empty(device=device)
            with torch.no_grad():
                for one in (*copied.parameters(), *copied.buffers()):
                    one.zero_()
        return Layer(layers.names[index], copied.to(device))

    def _runners(self, turns: Sequence[Layer], splits: bool) -> list[StageBackward]:
        stages = [Stage(0, [one], self._layers.unpacks) for one in turns]
        return [StageBackward(one, None, splits, self._emulation) for one in stages]

    def _timed(
        self,
        turns: Sequence[StageBackward],
        given: Message,
        under_way: int,
        counting: contextlib.AbstractContextManager[object] = _NOTHING,
    ) -> tuple[_Row, Message]:
        """Mean times, with others in flight, and the output.

        As in a step, activations have left the caches before their backward, each
        forward allocates new memory, and other layers have run since a layer's
        parameters were read.
        """
        for runner in turns:
            runner.begin_step()
        took_s: list[list[float]] = [[], [], [], []]
        for microbatch in range(under_way):
            for runner in turns:
                begin_s = self._now_s()
                with counting:
                    value = runner.forward(microbatch, given, {}, True)
                message = runner.keep(microbatch, as_plain(value))
                took_s[0].append(self._now_s() - begin_s)
                took_s[3].append(self.loop.pass_s(message))
                self._report()
        needed = zip(message.tensors, message.needs_grad, strict=True)
        gradients = [torch.ones_like(one) for one, is_needed in needed if is_needed]
        for microbatch in range(under_way):
            for runner in reversed(turns):
                begin_s = self._now_s()
                runner.backward_input(microbatch, gradients)
                input_s = self._now_s()
                self._report()
                weight_s = self._now_s()
                runner.backward_weight(microbatch)
                took_s[1].append(input_s - begin_s)
                took_s[2].append(self._now_s() - weight_s)
                self._report()
        forward_s, inputs_s, weights_s, message_s = map(fmean, took_s)
        return (forward_s, inputs_s, weights_s, message_s), message

    def _now_s(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def _report(self) -> None:
        if self._publish is not None:
            self._publish(self._text)
        if time.perf_counter() - self._logged_s > LOG_EVERY_S:
            self._logged_s = time.perf_counter()
            logger.info("measuring on %s: %s", self._device, self._text)


def _are_close(one_s: float, other_s: float) -> bool:
    return max(one_s, other_s) <= SAME_TIMES * min(one_s, other_s)


def _structure(module: nn.Module) -> object:
    """Types of a layer's modules, and forms of its parameters and buffers."""
    held = (*module.parameters(), *module.buffers())
    return (
        [(type(one), one.training) for one in module.modules()],
        [(one.shape, one.dtype, one.requires_grad) for one in held],
    )


def _on(given: Message, device: torch.device) -> Message:
    return replace(given, tensors=tuple(one.to(device) for one in given.tensors))


@final
class _Loop:
    """Message path through shared memory from this rank to itself.

    Args:
        device: device of the messages; only CPU messages use the path.
    """

    def __init__(self, device: torch.device) -> None:
        self._outgoing: OutgoingMemory | None = None
        self._incoming: IncomingMemory | None = None
        if device.type == "cpu" and may_share_memory():
            with contextlib.suppress(OSError):
                self._outgoing = OutgoingMemory()
                self._incoming = IncomingMemory.open(self._outgoing.offer)

    @property
    def is_open(self) -> bool:
        """True if the path exists."""
        return self._incoming is not None

    def pass_s(self, message: Message) -> float:
        """Time of a message at each of its ends: half of the total."""
        if self._outgoing is None or self._incoming is None:
            return 0.0
        begin_s = time.perf_counter()
        self._outgoing.send(0, Packed(message))
        for _ in self._incoming.read():
            pass
        return (time.perf_counter() - begin_s) / 2

    def close(self) -> None:
        """Releases the memory."""
        for line in (self._outgoing, self._incoming):
            if line is not None:
                line.close()


def _counting(
    layer: Layer, saved: dict[int, int]
) -> contextlib.AbstractContextManager[object]:
    """Context in which forward adds the bytes of each storage it saves, by address."""
    held = (*layer.module.parameters(), *layer.module.buffers())
    own = {one.untyped_storage().data_ptr() for one in held}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
