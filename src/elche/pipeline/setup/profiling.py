"""Measured layer times on this rank's device, and the plan from all ranks' times.

A layer is timed as it will run: through
`elche.pipeline.split_backward.backward.StageBackward`, with its weight gradients put
off, and whole. Where they cannot be put off, or where that costs too much, it runs its
backward whole, and the plan gets all of it as I, with no W. The ranks exchange what
they found, and each makes the same partition and schedule of it
(`elche.schedule.planning.planner`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.peers.stage_messages import Message
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import LayerList, layers_of
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.stage import Layer, OwnBackward, Stage
from elche.pipeline.trees import as_plain, as_tensors, batch_samples, flatten, unflatten
from elche.schedule.actions import Schedule
from elche.schedule.costs import StageCost
from elche.schedule.planning.layer_costs import LayerCosts
from elche.schedule.planning.plan import PlanConfig
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import (
    ADAM_STATE_FACTOR,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    PipelineProfile,
)

WARM_RUNS = 1
UNDER_WAY = 4
"""Microbatches at a time."""
RUNS = 3
_LEAST_S = 1e-9
MOST_SPLIT_COST = 1.05
"""A layer whose F, I and W take longer than so many times its F and B is not split."""


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer on one device, for one microbatch.

    Attributes:
        forward_s: median time of F.
        input_gradient_s: of I.
        weight_gradient_s: of W; 0 where the layer is not split, and I is all of it.
        backward_s: of B, the whole backward at once.
        activation_bytes: that forward keeps for backward, its parameters left out.
        output_bytes: of the message to the next layer.
        parameter_bytes: of its parameters.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float
    activation_bytes: int
    output_bytes: int
    parameter_bytes: int


def profile_layers(
    layers: Any, sample: Any, device: torch.device, runs: int = RUNS
) -> list[LayerMeasurement]:
    """Times forward, input gradient and weight gradient of each layer.

    Layers are copied, or built from their factories, one at a time: neither modules nor
    torch's random numbers change, and no more than one layer is on the device.

    Args:
        layers: an nn.Sequential, a list of modules or factories, or a `LayerList`.
        sample: one microbatch of the first layer's input.
        device: where to measure.
        runs: timed runs of each, after one that is not.

    Raises:
        ConfigError: a layer cannot be built, or returns no tensor.
    """
    listed = layers if isinstance(layers, LayerList) else layers_of(layers, None)
    sample = as_tensors(sample, "the sample")
    tensors, structure = flatten(sample, "the sample")
    given = Message(tuple(tensors), structure, (False,) * len(tensors))
    measured: list[LayerMeasurement] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for index in range(len(listed)):
            layer = _copy_of(listed, index, device)
            given = _on(given, device)
            found, given = _measure(layer, listed.unpacks, given, device, runs)
            measured.append(found)
    return measured


def check_measuring(schedule: str | Schedule, config: PipelineConfig) -> None:
    """Raises unless a plan can be made of measured times.

    Raises:
        ConfigError: there is no sample, or the plan is given already.
    """
    if config.sample is None:
        raise ConfigError(
            'costs="measure" needs sample=, one microbatch of the input, on every rank'
        )
    if config.partition is not None:
        raise ConfigError(
            'costs="measure" chooses the partition; leave partition out, or measure '
            "with profile_layers and give costs"
        )
    if batch_samples(as_tensors(config.sample, "the sample")) is None:
        raise ConfigError(
            "expected one microbatch of the input as sample=, with samples along its "
            f"first dimension, got {type(config.sample).__name__}"
        )
    if isinstance(schedule, Schedule) or schedule.endswith(".csv"):
        raise ConfigError(
            'costs="measure" needs the name of a schedule, such as "auto", got one '
            "that is made already"
        )


def plan_measured(
    told: Sequence[Sequence[Sequence[float]]],
    limits: Sequence[float],
    schedule: str,
    micro_batches: int,
    config: PipelineConfig,
) -> tuple[Schedule, PipelineConfig]:
    """The plan for what all ranks have measured; the same on every rank.

    Args:
        told: of each rank, its measurements as tuples.
        limits: of each rank, bytes for parameters, their state and activations.
        schedule: a name.
        micro_batches: of one step.
        config: the other settings.

    Returns:
        The schedule, compute only, and settings with its partition and costs.

    Raises:
        MismatchError: ranks have different numbers of layers.
        ConfigError: fewer layers than ranks, too little memory, or the schedule cannot
            run.
    """
    by_rank = [[LayerMeasurement(*one) for one in rows] for rows in told]  # type: ignore[arg-type]
    _check_counts(by_rank)
    profile = PipelineProfile(
        layers=tuple(
            _layer_profile(index, [rows[index] for rows in by_rank])
            for index in range(len(by_rank[0]))
        ),
        devices=tuple(
            DeviceProfile(
                name=f"rank {rank}", kind=f"rank {rank}", memory_bytes=limits[rank]
            )
            for rank in range(len(by_rank))
        ),
    )
    asked = PlanConfig(
        num_microbatches=micro_batches,
        schedule=schedule,
        stages_per_device=config.stages_per_rank or 2,
        use_all_devices=True,
    )
    chosen = plan_pipeline(profile, asked).chosen
    devices, ranks = chosen.partition.devices, chosen.partition.ranks
    by_device = [ranks.index(device) for device in range(len(by_rank))]
    limits = chosen.costs.memory
    made = Schedule(
        name=chosen.schedule.name,
        num_microbatches=micro_batches,
        placement=devices,
        actions=tuple(chosen.schedule.actions[rank] for rank in by_device),
    )
    costs = replace(
        chosen.costs,
        placement=devices,
        memory=tuple(limits[rank] for rank in by_device),
    )
    sizes = chosen.partition.sizes
    # The limits are those of the costs now, and of every later plan (`Planner`).
    return made, replace(config, partition=sizes, costs=costs, memory_bytes=None)


def layer_costs_of(
    told: Sequence[Sequence[Sequence[float]]], limits: Sequence[float] = ()
) -> LayerCosts:
    """What all ranks have measured as costs, in seconds and bytes.

    Args:
        told: of each rank, its measurements as tuples.
        limits: of each rank, bytes for parameters, their state and activations.

    Raises:
        MismatchError: ranks have different numbers of layers.
    """
    rows = [[LayerMeasurement(*one) for one in each] for each in told]  # type: ignore[arg-type]
    _check_counts(rows)
    return LayerCosts(
        by_rank=tuple(
            tuple(
                StageCost(
                    forward=one.forward_s,
                    input_gradient=one.input_gradient_s,
                    weight_gradient=one.weight_gradient_s,
                    backward=one.backward_s,
                    activation=one.activation_bytes,
                )
                for one in row
            )
            for row in rows
        ),
        memory=tuple(limits),
        state=tuple(ADAM_STATE_FACTOR * one.parameter_bytes for one in rows[0]),
    )


def as_message(measured: Sequence[LayerMeasurement]) -> list[list[float]]:
    """Measurements as the ranks exchange them."""
    return [list(astuple(one)) for one in measured]


def _check_counts(by_rank: Sequence[Sequence[LayerMeasurement]]) -> None:
    counts = [len(rows) for rows in by_rank]
    if len(set(counts)) > 1:
        raise MismatchError(f"ranks have different numbers of layers: {counts}")


def _layer_profile(index: int, by_rank: Sequence[LayerMeasurement]) -> LayerProfile:
    first = by_rank[0]
    return LayerProfile(
        name=f"layer {index}",
        times={
            f"rank {rank}": LayerTimes(
                forward_s=one.forward_s,
                input_gradient_s=one.input_gradient_s,
                weight_gradient_s=one.weight_gradient_s,
                backward_s=one.backward_s,
            )
            for rank, one in enumerate(by_rank)
        },
        activation_bytes=first.activation_bytes,
        output_bytes=first.output_bytes,
        parameter_bytes=first.parameter_bytes,
    )


def _copy_of(layers: LayerList, index: int, device: torch.device) -> Layer:
    """A layer of its own to measure; the values of a meta layer do not matter."""
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
    return layers.build([index], device, None, None)[0]


def _on(given: Message, device: torch.device) -> Message:
    return replace(given, tensors=tuple(one.to(device) for one in given.tensors))


def _measure(
    layer: Layer, unpacks: bool, given: Message, device: torch.device, runs: int
) -> tuple[LayerMeasurement, Message]:
    """Times a layer; returns what it hands on, too."""
    stage = Stage(0, [layer], unpacks)
    split, whole = (StageBackward(stage, None, splits) for splits in (True, False))
    rows: list[tuple[float, ...]] = []
    for _ in range(WARM_RUNS + runs):
        rows.append((*_timed(split, given, device), *_timed(whole, given, device)))
    columns = list(zip(*islice(rows, WARM_RUNS, None), strict=True))
    times = [max(_LEAST_S, median(column)) for column in columns]
    (forward_s, input_s, weight_s), (whole_s, *backward) = times[:3], times[3:]
    backward_s = sum(backward)
    # Whatever else the machine does only adds to a time.
    least = [max(_LEAST_S, min(column)) for column in columns]
    split_cost = sum(least[:3]) / sum(least[3:])
    has_own = isinstance(layer.module, OwnBackward)
    is_put_off = split.profile.deferred_flops > 0 and split_cost <= MOST_SPLIT_COST
    if not has_own and not is_put_off:
        forward_s, input_s, weight_s = whole_s, backward_s, 0.0
    message = whole.keep(0, as_plain(whole.forward(0, given, {}, False)))
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
        ),
        message,
    )


def _timed(
    runner: StageBackward, given: Message, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of F, I and W of a microbatch, with others under way as in a step.

    So activations have left the caches when their backward pass comes, and each
    forward pass takes memory that the last one has not given back.
    """
    runner.begin_step()
    took_s: list[list[float]] = [[], [], []]
    gradients: list[list[torch.Tensor | None]] = []
    for microbatch in range(UNDER_WAY):
        begin_s = _now_s(device)
        value = runner.forward(microbatch, given, {}, True)
        message = runner.keep(microbatch, as_plain(value))
        took_s[0].append(_now_s(device) - begin_s)
        gradients.append(
            [
                torch.ones_like(one)
                for one, needed in zip(message.tensors, message.needs_grad, strict=True)
                if needed
            ]
        )
    for microbatch, each in enumerate(gradients):
        begin_s = _now_s(device)
        runner.backward_input(microbatch, each)
        input_s = _now_s(device)
        runner.backward_weight(microbatch)
        took_s[1].append(input_s - begin_s)
        took_s[2].append(_now_s(device) - input_s)
    forward_s, inputs_s, weights_s = map(median, took_s)
    return forward_s, inputs_s, weights_s


def _activation_bytes(layer: Layer, unpacks: bool, given: Message) -> int:
    """Bytes of all that forward saves, each piece of memory once."""
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
        # Copies, which a layer may change in place.
        inputs = [
            one.detach().requires_grad_(needed).clone()
            for one, needed in zip(given.tensors, given.needs_grad, strict=True)
        ]
        Stage(0, [layer], unpacks).run(unflatten(given.structure, inputs), 0, {})
    return sum(saved.values())


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
