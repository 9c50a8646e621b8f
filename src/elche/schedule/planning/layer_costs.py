"""Cost of every layer on every rank: stages of any partition are sums of these.

Known from profiles of single layers, or assumed from the times of whole stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elche.errors import ConfigError
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.planning.partition import (
    Partition,
    Places,
    ProfileTable,
    best_partition,
)
from elche.schedule.planning.partition_search import Evaluator, refine
from elche.schedule.planning.profile import (
    ADAM_STATE_FACTOR,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)

REFINED_ACTIONS = 50_000  # timed while a partition is refined
_WHOLE = 1e6  # the planner counts memory in whole bytes
_LEAST_ROOM = 1e-9  # a limit must be above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Layers on ranks.

    Attributes:
        by_rank: of each rank, what each layer costs there.
        link: time of a message between two ranks.
        memory: units of activations and `state` that each rank may hold; empty means no
            limit.
        state: of each layer, units that its parameters and their state take wherever
            it stands; empty where that is not known, or is not part of `memory`.
    """

    by_rank: tuple[tuple[StageCost, ...], ...]
    link: float = 0.0
    memory: tuple[float, ...] = ()
    state: tuple[float, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.by_rank[0])


def stage_costs(
    costs: LayerCosts, placement: Sequence[int], sizes: Sequence[int]
) -> PipelineCosts:
    """Costs of the stages of a partition.

    Raises:
        ConfigError: a rank's memory does not hold the parameters of its layers.
    """
    stages: list[StageCost] = []
    states = [0.0] * len(costs.by_rank)
    begin = 0
    for rank, size in zip(placement, sizes, strict=True):
        stages.append(_sum(costs.by_rank[rank][begin : begin + size]))
        states[rank] += math.fsum(costs.state[begin : begin + size])
        begin += size
    return PipelineCosts(
        stages=tuple(stages),
        placement=tuple(placement),
        num_ranks=len(costs.by_rank),
        links=(costs.link,) * (len(stages) - 1),
        memory=tuple(
            _room(rank, limit, state)
            for rank, (limit, state) in enumerate(
                zip(costs.memory, states, strict=False)
            )
        ),
    )


def assumed_costs(costs: PipelineCosts, sizes: Sequence[int]) -> LayerCosts:
    """Layers from the times of stages.

    The layers of a stage are taken as alike, and ranks as differing by one factor: the
    mean time of the layers that they have. A rank that has none counts as the mean of
    the others.
    """
    times, layers = [0.0] * costs.num_ranks, [0] * costs.num_ranks
    for stage, rank, size in zip(costs.stages, costs.placement, sizes, strict=True):
        times[rank] += total_of(stage)
        layers[rank] += size
    means = [
        time / count if count else 0.0
        for time, count in zip(times, layers, strict=True)
    ]
    known = [one for one, count in zip(means, layers, strict=True) if count]
    means = [one or sum(known) / len(known) for one in means]
    rows: list[list[StageCost]] = [[] for _ in means]
    for stage, rank, size in zip(costs.stages, costs.placement, sizes, strict=True):
        for other, row in enumerate(rows):
            factor = means[other] / means[rank] if means[rank] else 1.0
            row += [_scaled(stage, factor / size, 1 / size)] * size
    links = [costs.link(stage) for stage in range(len(costs.stages) - 1)]
    used = [one for one in links if one > 0]
    return LayerCosts(
        by_rank=tuple(map(tuple, rows)),
        link=sum(used) / len(used) if used else 0.0,
        memory=costs.memory,
    )


def corrected(
    costs: LayerCosts, planned: PipelineCosts, measured: PipelineCosts
) -> LayerCosts:
    """Layers' profiles after stages were measured: each rank by one factor.

    Args:
        costs: profiled.
        planned: of the stages, from the profiles.
        measured: of the same stages.
    """
    before, now = [0.0] * len(costs.by_rank), [0.0] * len(costs.by_rank)
    for rank, one, other in zip(
        planned.placement, planned.stages, measured.stages, strict=True
    ):
        before[rank] += total_of(one)
        now[rank] += total_of(other)
    factors = [
        b / a if a > 0 and b > 0 else 1.0 for a, b in zip(before, now, strict=True)
    ]
    return replace(
        costs,
        by_rank=tuple(
            tuple(_scaled(one, factor, 1.0) for one in row)
            for row, factor in zip(costs.by_rank, factors, strict=True)
        ),
    )


def best_sizes(
    costs: LayerCosts,
    placement: Sequence[int],
    sizes: Sequence[int],
    num_microbatches: int,
) -> tuple[int, ...]:
    """Layers of each stage for the shortest step, where the ranks of stages stay.

    Args:
        costs: of the layers.
        placement: the rank of each stage.
        sizes: layers of each stage now; at least one, and then, too.
        num_microbatches: of one step.
    """
    table = ProfileTable(_profile(costs), num_microbatches)
    evaluator = Evaluator(table)
    devices = tuple(placement)
    places = Places(devices=devices, held=(1,) * len(devices), may_be_empty=False)
    starts = [Partition(devices, tuple(sizes)), best_partition(table, places)]
    for start in starts:
        if start is not None and evaluator.step_s(start) < math.inf:
            refine(evaluator, start, REFINED_ACTIONS)
    ranked = evaluator.ranked()
    return ranked[0].sizes if ranked else tuple(sizes)


def total_of(stage: StageCost) -> float:
    """Time of a stage for one microbatch, with the cheaper of B and I + W."""
    split = stage.input_gradient + stage.weight_gradient
    return stage.forward + min(stage.full_backward, split)


def _room(rank: int, limit: float, state: float) -> float:
    """Memory of a rank that is left for activations."""
    if state > limit:
        raise ConfigError(
            f"rank {rank} may hold {limit:,.0f} bytes, but the parameters of its "
            f"layers and their state take {state:,.0f}; give it fewer layers, or more "
            "memory"
        )
    return max(limit - state, _LEAST_ROOM)


def _profile(costs: LayerCosts) -> PipelineProfile:
    return PipelineProfile(
        layers=tuple(
            _layer_profile(
                *(index, [row[index] for row in costs.by_rank]),
                costs.state[index] if costs.state else 0.0,
            )
            for index in range(costs.num_layers)
        ),
        devices=tuple(
            DeviceProfile(
                name=f"rank {rank}",
                kind=f"rank {rank}",
                memory_bytes=costs.memory[rank] * _WHOLE if costs.memory else math.inf,
            )
            for rank in range(len(costs.by_rank))
        ),
        link=LinkProfile(latency_s=costs.link),
    )


def _layer_profile(
    index: int, by_rank: Sequence[StageCost], state: float
) -> LayerProfile:
    first = by_rank[0]
    return LayerProfile(
        name=f"layer {index}",
        times={
            f"rank {rank}": LayerTimes(
                forward_s=one.forward,
                input_gradient_s=one.input_gradient,
                weight_gradient_s=one.weight_gradient,
                backward_s=one.backward,
            )
            for rank, one in enumerate(by_rank)
        },
        activation_bytes=first.activation * _WHOLE,
        kept_for_weight_bytes=first.kept * _WHOLE,
        parameter_bytes=state * _WHOLE / ADAM_STATE_FACTOR,
    )


def _sum(layers: Sequence[StageCost]) -> StageCost:
    has_whole = any(one.backward is not None for one in layers)
    return StageCost(
        forward=math.fsum(one.forward for one in layers),
        input_gradient=math.fsum(one.input_gradient for one in layers),
        weight_gradient=math.fsum(one.weight_gradient for one in layers),
        backward=(
            math.fsum(one.full_backward for one in layers) if has_whole else None
        ),
        activation=math.fsum(one.activation for one in layers),
        kept_for_weight=math.fsum(one.kept for one in layers),
    )


def _scaled(stage: StageCost, time: float, memory: float) -> StageCost:
    return StageCost(
        forward=stage.forward * time,
        input_gradient=stage.input_gradient * time,
        weight_gradient=stage.weight_gradient * time,
        backward=None if stage.backward is None else stage.backward * time,
        activation=stage.activation * memory,
        kept_for_weight=stage.kept * memory,
    )
