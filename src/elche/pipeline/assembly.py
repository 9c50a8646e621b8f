"""This rank's part of a pipeline, put together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from elche.pipeline.backward import StageBackward
from elche.pipeline.building import LayerList
from elche.pipeline.config import PipelineConfig
from elche.pipeline.executor import Executor
from elche.pipeline.guard import ContributionGuard
from elche.pipeline.peers import Peers
from elche.pipeline.planning import PipelinePlan
from elche.pipeline.stage import Stage
from elche.pipeline.tied import Tie, TiedParameters
from elche.schedule.formats import to_text


@dataclass(frozen=True)
class Parts:
    """What a rank holds.

    Attributes:
        plan: schedule and partition.
        stages: this rank's, by index, ascending.
        executor: runs them.
        device: where.
        tied: parameters that other ranks hold, too; None where there are none.
        layers: of the whole model.
        config: the settings.
    """

    plan: PipelinePlan
    stages: dict[int, StageBackward]
    executor: Executor
    device: torch.device
    tied: TiedParameters | None
    layers: LayerList
    config: PipelineConfig

    def describe(self) -> list[tuple[str, str]]:
        """What must agree between ranks, by name."""
        settings: list[object] = [
            self.config.loss_reduction,
            self.config.split_backward,
            self.config.guard,
            self.config.seed,
        ]
        return [
            ("the schedule", _digest(to_text(self.plan.schedule))),
            ("the partition", str(list(self.plan.partition))),
            ("the layers", _digest(self._layers())),
            ("the settings", str(settings)),
        ]

    def order_of(self, name: str) -> tuple[int, str]:
        """Sorts the model's names by layer."""
        for index, prefix in enumerate(self.layers.names):
            if name == prefix or name.startswith(f"{prefix}."):
                return index, ""
        return len(self.layers), name

    def _layers(self) -> Any:
        return self.layers.describe()


def assemble(
    layers: LayerList,
    plan: PipelinePlan,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    device: torch.device,
    peers: Peers | None,
    config: PipelineConfig,
) -> Parts:
    """Builds this rank's stages.

    Raises:
        ConfigError: a layer cannot be built.
    """
    rank = 0 if peers is None else peers.rank
    ties = layers.ties()
    stages: dict[int, StageBackward] = {}
    for index in plan.schedule.stages_of(rank):
        mine = plan.layers_of(index)
        built = layers.build(mine, device, config.seed, config.init)
        stage = Stage(index, built, layers.unpacks, config.seed, mine.start)
        stages[index] = _runner(stage, plan, config)
    executor = Executor(
        rank, plan.schedule, stages, peers and peers.transport, loss_fn, device
    )
    tied = None if peers is None else _tied(ties, plan, stages, peers)
    return Parts(plan, stages, executor, device, tied, layers, config)


def _runner(stage: Stage, plan: PipelinePlan, config: PipelineConfig) -> StageBackward:
    learning = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    guard = ContributionGuard(stage.index, learning, plan.schedule.name)
    return StageBackward(stage, guard if config.guard else None, config.split_backward)


def _tied(
    ties: list[list[tuple[int, str]]],
    plan: PipelinePlan,
    stages: dict[int, StageBackward],
    peers: Peers,
) -> TiedParameters | None:
    stage_of = {
        layer: stage
        for stage in range(plan.schedule.num_stages)
        for layer in plan.layers_of(stage)
    }
    found = []
    for uses in ties:
        ranks = sorted({plan.schedule.placement[stage_of[layer]] for layer, _ in uses})
        if len(ranks) < 2:
            continue
        mine = None
        for layer, name in uses:
            stage = stage_of[layer]
            if stage in stages:
                number = layer - plan.layers_of(stage).start
                module = stages[stage].stage.modules[number]
                mine = mine or dict(module.named_parameters())[name]
        found.append(Tie(tuple(ranks), mine))
    return TiedParameters(found, peers) if found else None


def _digest(value: Any) -> str:
    return hashlib.sha256(msgpack.packb(value)).hexdigest()[:16]
