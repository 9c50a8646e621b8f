"""Plan from the layer times measured on all ranks.

The ranks exchange their measurements, and each computes the same partition and schedule
from them (`elche.schedule.planning.planner`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from elche.devices.memory import read_memory
from elche.errors import ConfigError, MismatchError
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import LayerList
from elche.pipeline.setup.profiling import LayerMeasurement
from elche.pipeline.trees import as_tensors, batch_samples
from elche.runtime.process.environment import Placement
from elche.schedule.actions import Schedule
from elche.schedule.planning.plan import PlanConfig
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import (
    DeviceProfile,
    LayerProfile,
    LinkProfile,
    PipelineProfile,
)

logger = logging.getLogger(__name__)

USABLE_SHARE = 0.9
"""Usable fraction of a device's free memory; fragmentation takes the rest."""


def check_measuring(schedule: str | Schedule, config: PipelineConfig) -> None:
    """Raises unless settings allow a plan from measured times."""
    if config.sample is None:
        raise ConfigError(
            'costs="measure" needs sample=, one microbatch of the input, on every rank'
        )
    if config.partition is not None:
        raise ConfigError(
            'costs="measure" chooses the partition; leave partition out, or give costs'
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


def memory_limit(
    config: PipelineConfig,
    placement: Placement,
    device: torch.device,
    layers: LayerList,
) -> float:
    """Bytes for parameters, their state and activations on this rank.

    Layers already on the device count as free memory: they are part of the plan.

    Returns:
        The limit in the settings, else a fraction of the device's free memory. It is
        infinite if the device does not report memory, and on the CPU, whose memory is
        shared and can be swapped.
    """
    if config.memory_bytes is not None:
        if len(config.memory_bytes) != placement.world_size:
            raise ConfigError(
                f"expected memory_bytes for each of {placement.world_size} ranks, got "
                f"{list(config.memory_bytes)}"
            )
        return float(config.memory_bytes[placement.rank])
    reading = read_memory(device)
    if not reading.total_bytes:
        return math.inf
    here = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for source in layers.sources
        if isinstance(source, nn.Module)
        for one in (*source.parameters(), *source.buffers())
        if one.device == device
    }
    return USABLE_SHARE * (reading.free_bytes + sum(here.values()))


def plan_measured(
    by_rank: Sequence[Sequence[LayerMeasurement]],
    limits: Sequence[float],
    schedule: str,
    micro_batches: int,
    config: PipelineConfig,
    links: Sequence[tuple[int, int, float, float]] = (),
) -> tuple[Schedule, PipelineConfig]:
    """Plan for the measurements of all ranks; the same on every rank.

    Returns:
        The compute-only schedule, and settings with its partition and costs. A rank
        that would lengthen the step has no stage.
    """
    counts = [len(rows) for rows in by_rank]
    if len(set(counts)) > 1:
        raise MismatchError(f"ranks have different numbers of layers: {counts}")
    profile = _profile(by_rank, limits, links)
    asked = PlanConfig(
        num_microbatches=micro_batches,
        schedule=schedule,
        stages_per_device=config.stages_per_rank or 2,
    )
    chosen = plan_pipeline(profile, asked).chosen
    devices, ranks = chosen.partition.devices, chosen.partition.ranks
    memory = dict(zip(ranks, chosen.costs.memory, strict=False))
    made = chosen.schedule.renumbered(dict(enumerate(ranks)), len(by_rank))
    costs = replace(
        chosen.costs,
        placement=devices,
        num_ranks=len(by_rank),
        memory=tuple(memory.get(d, math.inf) for d in range(len(by_rank))),
    )
    sizes = chosen.partition.sizes
    logger.info(
        "measured plan: %s, stages of %s layers on ranks %s, %.3g s a step",
        *(made.name, list(sizes), list(devices), chosen.step_s),
    )
    # The costs contain the limits now.
    return made, replace(config, partition=sizes, costs=costs, memory_bytes=None)


def _profile(
    by_rank: Sequence[Sequence[LayerMeasurement]],
    limits: Sequence[float],
    links: Sequence[tuple[int, int, float, float]],
) -> PipelineProfile:
    names = [f"rank {rank}" for rank in range(len(by_rank))]
    layers = [
        LayerProfile(
            name=f"layer {index}",
            times=dict(zip(names, row, strict=True)),
            activation_bytes=row[0].activation_bytes,
            output_bytes=row[0].output_bytes,
            parameter_bytes=row[0].parameter_bytes,
        )
        for index, row in enumerate(zip(*by_rank, strict=True))
    ]
    devices = [
        DeviceProfile(name=name, kind=name, memory_bytes=limit)
        for name, limit in zip(names, limits, strict=True)
    ]
    between = {
        (one, other): LinkProfile(
            latency_s=latency_s, bytes_per_s=bytes_per_s, efficiency=1.0
        )
        for one, other, latency_s, bytes_per_s in links
    }
    return PipelineProfile(layers=tuple(layers), devices=tuple(devices), links=between)
