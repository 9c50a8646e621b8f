"""Measured layer times on this rank's device.

A layer is timed as it will run: through
`elche.pipeline.split_backward.backward.StageBackward`, with deferred weight gradients,
and unsplit. If its weight gradients cannot be deferred, or deferral costs too much, its
backward runs unsplit. The plan (`elche.pipeline.setup.measured_plan`) then counts all
of it as I, without W.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, final

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
from elche.pipeline.trees import as_plain, as_tensors, flatten, unflatten

WARM_RUNS = 1
UNDER_WAY = 4
"""Number of microbatches in flight while a layer is timed."""
MOST_TURNS = 4
TURNS_BYTES = 64 * 2**20
"""Most parameter bytes of a layer and its copies that are timed in turn.

In a step, the other layers of the stage evict a layer's parameters from the caches.
Larger parameters do not stay in the caches anyway.
"""
RUNS = 3
_LEAST_S = 1e-9
MOST_SPLIT_COST = 1.05
"""Largest ratio of F + I + W to F + B at which a layer is still split."""


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Measurements of one layer on one device, for one microbatch.

    Attributes:
        forward_s: median time of F.
        input_gradient_s: median time of I.
        weight_gradient_s: median time of W; 0 for an unsplit layer, whose I is all of
            B.
        backward_s: median time of B, the whole backward at once.
        activation_bytes: bytes that forward keeps for backward, without parameters.
        output_bytes: size of the message to the next layer.
        parameter_bytes: size of the parameters.
        message_s: time to write the output for another rank on this host, or to read
            it; 0 if messages do not use shared memory.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float
    activation_bytes: int
    output_bytes: int
    parameter_bytes: int
    message_s: float = 0.0


def profile_layers(
    layers: LayerList, sample: Any, device: torch.device
) -> list[LayerMeasurement]:
    """Times forward, input gradient and weight gradient of each layer.

    Layers are copied, or built from their factories, one at a time. Neither modules nor
    torch's random numbers change, and the device never holds more than one layer, or a
    few copies of a small one.

    Args:
        layers: layers of the model.
        sample: one microbatch of the first layer's input.
        device: device to measure on.

    Raises:
        ConfigError: a layer cannot be built, or returns no tensor.
    """
    sample = as_tensors(sample, "the sample")
    tensors, structure = flatten(sample, "the sample")
    given = Message(tuple(tensors), structure, (False,) * len(tensors))
    measured: list[LayerMeasurement] = []
    with random_state.forked([device]):
        for index in range(len(layers)):
            turns = _turns(layers, index, device)
            given = _on(given, device)
            found, given = _measure(turns, layers.unpacks, given, device)
            measured.append(found)
    return measured


def _copy_of(layers: LayerList, index: int, device: torch.device) -> Layer:
    """Separate copy of a layer to measure; a meta layer is filled with zeros."""
    source = layers.sources[index]
    if isinstance(source, nn.Module):
        held = (*source.parameters(), *source.buffers())
        copied = copy.deepcopy(source)
        if any(one.is_meta for one in held):
            copied.to_empty(device=device)
            with torch.no_grad():
                for one in (*copied.parameters(), *copied.buffers()):
                    one.zero_()
        return Layer(layers.names[index], copied.to(device))
    return layers.build([index], device, None)[0]


def _turns(layers: LayerList, index: int, device: torch.device) -> list[Layer]:
    """A layer to measure, and copies of it to run in between."""
    layer = _copy_of(layers, index, device)
    size_bytes = max(1, sum(one.nbytes for one in layer.module.parameters()))
    turns = min(MOST_TURNS, len(layers), max(1, TURNS_BYTES // size_bytes))
    return [layer, *(_copy_of(layers, index, device) for _ in range(turns - 1))]


def _on(given: Message, device: torch.device) -> Message:
    return replace(given, tensors=tuple(one.to(device) for one in given.tensors))


def _measure(
    turns: Sequence[Layer],
    unpacks: bool,
    given: Message,
    device: torch.device,
) -> tuple[LayerMeasurement, Message]:
    """Times a layer; returns the times and its output."""
    layer = turns[0]
    stages = [Stage(0, [one], unpacks) for one in turns]
    split, whole = (
        [StageBackward(stage, None, splits) for stage in stages]
        for splits in (True, False)
    )
    rows: list[tuple[float, ...]] = []
    with contextlib.closing(_Loop(device)) as loop:
        for _ in range(WARM_RUNS + RUNS):
            rows.append(
                (
                    *_timed(split, given, device, loop),
                    *_timed(whole, given, device, loop),
                )
            )
    columns = list(zip(*islice(rows, WARM_RUNS, None), strict=True))
    times = [max(_LEAST_S, median(column)) for column in columns]
    forward_s, input_s, weight_s, _, whole_s, *backward, message_s = times
    backward_s = sum(backward)
    # Other load on the machine only adds to a time, so compare minima.
    least = [max(_LEAST_S, min(column)) for column in columns]
    split_cost = sum(least[:3]) / sum(least[4:7])
    is_put_off = split[0].deferred > 0 and split_cost <= MOST_SPLIT_COST
    has_own = isinstance(layer.module, OwnBackward)
    if not has_own and not is_put_off:
        forward_s, input_s, weight_s = whole_s, backward_s, 0.0
    message = whole[0].keep(0, as_plain(whole[0].forward(0, given, {}, False)))
    parameters = list(layer.module.parameters())
    return (
        LayerMeasurement(
            forward_s=forward_s,
            input_gradient_s=input_s,
            weight_gradient_s=weight_s,
            backward_s=backward_s,
            activation_bytes=_activation_bytes(layer, unpacks, given),
            output_bytes=sum(one.nbytes for one in message.tensors),
            parameter_bytes=sum(one.nbytes for one in parameters),
            message_s=message_s if loop.is_open else 0.0,
        ),
        message,
    )


def _timed(
    turns: Sequence[StageBackward], given: Message, device: torch.device, loop: _Loop
) -> tuple[float, float, float, float]:
    """Mean seconds of F, I, W and one end of a message, with others in flight.

    As in a step, activations have left the caches before their backward, each forward
    allocates new memory, and other layers have run since a layer's parameters were
    read.
    """
    for runner in turns:
        runner.begin_step()
    took_s: list[list[float]] = [[], [], [], []]
    gradients: list[list[torch.Tensor | None]] = []
    for microbatch in range(UNDER_WAY):
        for runner in turns:
            begin_s = _now_s(device)
            value = runner.forward(microbatch, given, {}, True)
            message = runner.keep(microbatch, as_plain(value))
            took_s[0].append(_now_s(device) - begin_s)
            took_s[3].append(loop.pass_s(message))
        gradients.append(
            [
                torch.ones_like(one)
                for one, needed in zip(message.tensors, message.needs_grad, strict=True)
                if needed
            ]
        )
    for microbatch, each in enumerate(gradients):
        for runner in reversed(turns):
            begin_s = _now_s(device)
            runner.backward_input(microbatch, each)
            input_s = _now_s(device)
            runner.backward_weight(microbatch)
            took_s[1].append(input_s - begin_s)
            took_s[2].append(_now_s(device) - input_s)
    forward_s, inputs_s, weights_s, message_s = map(fmean, took_s)
    return forward_s, inputs_s, weights_s, message_s


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


def _activation_bytes(layer: Layer, unpacks: bool, given: Message) -> int:
    """Bytes that forward saves, each storage counted once."""
    own = {
        one.untyped_storage().data_ptr()
        for one in (*layer.module.parameters(), *layer.module.buffers())
    }
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Clones, which a layer may change in place.
        inputs = [
            one.detach().requires_grad_(needed).clone()
            for one, needed in zip(given.tensors, given.needs_grad, strict=True)
        ]
        Stage(0, [layer], unpacks).run(unflatten(given.structure, inputs), 0, {})
    return sum(saved.values())


def _now_s(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
