"""The plan from all ranks' measured layers and links.

The ranks exchange what they found, and each makes the same partition and schedule of it
(`elche.schedule.planning.planner`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from elche.errors import MismatchError
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.profiling import LayerMeasurement
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
    LinkProfile,
    PipelineProfile,
)


def plan_measured(
    told: Sequence[Sequence[Sequence[float]]],
    limits: Sequence[float],
    schedule: str,
    micro_batches: int,
    config: PipelineConfig,
    links: Mapping[tuple[int, int], LinkProfile] | None = None,
) -> tuple[Schedule, PipelineConfig]:
    """The plan for what all ranks have measured; the same on every rank.

    Args:
        told: of each rank, its measurements as tuples.
        limits: of each rank, bytes for parameters, their state and activations.
        schedule: a name.
        micro_batches: of one step.
        config: the other settings.
        links: between two ranks, the lower place first; None: messages cost nothing.

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
        links=links or {},
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
    # The limits are those of the costs now.
    return made, replace(config, partition=sizes, costs=costs, memory_bytes=None)


def layer_costs_of(
    told: Sequence[Sequence[Sequence[float]]],
    limits: Sequence[float] = (),
    links: Mapping[tuple[int, int], LinkProfile] | None = None,
) -> LayerCosts:
    """Costs in seconds and bytes, from the measurements of all ranks.

    Args:
        told: of each rank, its measurements as tuples.
        limits: of each rank, bytes for parameters, their state and activations.
        links: as for `plan_measured`; the mean of all messages is taken.

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
        link=_mean_message_s([one.output_bytes for one in rows[0]], links or {}),
        memory=tuple(limits),
        state=tuple(ADAM_STATE_FACTOR * one.parameter_bytes for one in rows[0]),
    )


def unsplit_layers(costs: LayerCosts | None, seat: int) -> frozenset[int]:
    """Layers whose backward runs whole on a rank, by what was measured there."""
    rows = () if costs is None else costs.by_rank[seat]
    return frozenset(i for i, one in enumerate(rows) if not one.weight_gradient)


def _mean_message_s(
    sizes: Sequence[int], links: Mapping[tuple[int, int], LinkProfile]
) -> float:
    times = [
        link.latency_s + link.transfer_s(size)
        for link in links.values()
        for size in sizes[:-1]
    ]
    return fmean(times) if times else 0.0


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
                message_s=one.message_s,
            )
            for rank, one in enumerate(by_rank)
        },
        activation_bytes=first.activation_bytes,
        output_bytes=first.output_bytes,
        parameter_bytes=first.parameter_bytes,
    )
