"""Assembly of this rank's part of a pipeline."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elche.pipeline.cutting.own_loss import OwnLoss
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import LayerList
from elche.pipeline.setup.meta_tensors import MetaTensors
from elche.pipeline.setup.planning import PipelinePlan
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.stage import Layer, Stage, named_parameters
from elche.pipeline.step.executor import Executor
from elche.runtime.emulation import EmulationConfig
from elche.schedule.actions import Kind
from elche.schedule.formats import to_csv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blueprint:
    """Layers and settings of a pipeline, before placement.

    Attributes:
        layers: layers of the whole model.
        loss_fn: function of output and target.
        device: device of this rank.
        config: the settings.
        ties: parameters used in several places of the model, see `LayerList.ties`. They
            are found before layers are built: building separates them on meta devices.
        unsplit: layers whose backward is not split on this rank.
        meta: this rank's tensors of layers that were on the meta device.
        emulation: speed of an emulated device, per layer; None for a real device.
    """

    layers: LayerList
    loss_fn: Callable[[Any, Any], torch.Tensor]
    device: torch.device
    config: PipelineConfig
    ties: list[list[tuple[int, str]]]
    unsplit: frozenset[int] = frozenset()
    meta: MetaTensors = field(default_factory=MetaTensors)
    emulation: EmulationConfig | None = None


@dataclass(frozen=True)
class Parts:
    """Plan, stages and executor of a rank.

    Attributes:
        given: blueprint from which these parts were built.
        plan: schedule and partition.
        stages: this rank's stages, by index, ascending.
        executor: executor of the stages.
    """

    given: Blueprint
    plan: PipelinePlan
    stages: dict[int, StageBackward]
    executor: Executor

    @property
    def rank(self) -> int:
        """This rank."""
        return self.executor.rank

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage and reads the batch."""
        return self.plan.schedule.placement[0] == self.rank

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage and reads the target."""
        return self.plan.schedule.placement[-1] == self.rank

    @property
    def built(self) -> dict[int, Layer]:
        """This rank's layers, by index in the model."""
        return {
            index: layer
            for stage, runner in self.stages.items()
            for index, layer in zip(
                self.plan.layers_of(stage), runner.stage.layers, strict=True
            )
        }

    @property
    def layers(self) -> tuple[Layer, ...]:
        """This rank's layers, in the model's order."""
        return tuple(self.built.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters under the model's names, each listed once."""
        return named_parameters(self.layers)

    def omitted_by(self, batch: Any, keywords: Mapping[str, Any]) -> list[str]:
        """See `elche.pipeline.cutting.arguments.Arguments`; on the first rank.

        Returns an empty list for layers that elche did not cut.
        """
        if batch is None or self.given.layers.cut_again is None:
            return []
        first: Any = self.built[0].module
        omitted: list[str] = first.arguments.omitted_by(batch, keywords)
        return omitted

    def detach(self) -> None:
        """Removes the guards' hooks from the parameters."""
        for runner in self.stages.values():
            if runner.guard is not None:
                runner.guard.detach()

    def describe(self) -> list[tuple[str, str]]:
        """Values that must agree between ranks, by name."""
        config = self.given.config
        settings: list[object] = [
            config.loss_reduction,
            config.split_backward,
            config.guard,
            config.seed,
            config.transport,
            config.whole,
            config.weight_of is not None,
            isinstance(self.given.loss_fn, OwnLoss),
        ]
        schedule = self.plan.schedule
        digest = hashlib.sha256(to_csv(schedule).encode()).hexdigest()
        form = (
            f"{schedule.name} of {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches ({digest[:16]})"
        )
        layers = enumerate(self.given.layers.describe())
        return [
            ("the schedule", form),
            ("the partition", str(list(self.plan.partition))),
            *((f"the layers, at {index}", text) for index, text in layers),
            ("the settings", str(settings)),
        ]

    def is_elsewhere(self, name: str) -> bool:
        """True if a name in a state may belong to another rank.

        Other ranks' layers are not built here: only their prefixes are known. For a
        split model all names are known. Extra state belongs to no rank.
        """
        layers = self.given.layers
        if name in layers.state_names or name.endswith("_extra_state"):
            return True
        return any(
            name == prefix or name.startswith(f"{prefix}.")
            for index, prefix in enumerate(layers.names)
            if index not in self.built
        )

    def order_of(self, name: str) -> tuple[int, str]:
        """Sort key of the model's names, by layer."""
        for index, prefix in enumerate(self.given.layers.names):
            if name == prefix or name.startswith(f"{prefix}."):
                return index, ""
        return len(self.given.layers), name


def assemble(given: Blueprint, plan: PipelinePlan, peers: StagePeers | None) -> Parts:
    """Builds this rank's layers, stages and executor for a plan."""
    rank = 0 if peers is None else peers.rank
    layers, seed = given.layers, given.config.seed
    if seed is None and plan.schedule.num_ranks > 1:
        # Without a seed, after one manual_seed in the script, equal layers on two ranks
        # would start equal and share dropout masks. Loaders would shuffle differently
        # on the first and the last stage's rank.
        seed = torch.initial_seed()
    places = {index: plan.layers_of(index) for index in plan.schedule.stages_of(rank)}
    mine = [index for some in places.values() for index in some]
    built = layers.build(mine, given.device, seed, given.meta)
    stages: dict[int, StageBackward] = {}
    for index, some in places.items():
        own = [built[layer] for layer in some]
        unsplit = [layer - some.start for layer in some if layer in given.unsplit]
        stage = Stage(index, own, layers.unpacks, seed, some.start, unsplit)
        stages[index] = _runner(stage, plan, given)
    ends = (peers and peers.transport, given.loss_fn, given.device)
    executor = Executor(rank, plan.schedule, stages, *ends)
    if any(one.kind is Kind.BACKWARD_WEIGHT for one in plan.schedule.actions[rank]):
        _log_unsplit(stages)
    return Parts(given, plan, stages, executor)


def _runner(stage: Stage, plan: PipelinePlan, given: Blueprint) -> StageBackward:
    guard, config = None, given.config
    if config.guard:
        named = named_parameters(stage.layers).items()
        learning = {name: one for name, one in named if one.requires_grad}
        guard = ContributionGuard(stage.index, learning, plan.schedule.name)
    return StageBackward(stage, guard, config.split_backward, given.emulation)


def _log_unsplit(stages: dict[int, StageBackward]) -> None:
    names = [name for one in stages.values() for name in one.unsplit()]
    if names:
        logger.info(
            "the backward of %s runs whole: no weight gradient is deferred into the "
            "schedule's gaps; those of nn.Linear, nn.Embedding, nn.Conv1d to "
            "nn.ConvTranspose3d, nn.MultiheadAttention and GPT-2's Conv1D are "
            "deferred, of exactly these types and without hooks on their parameters",
            ", ".join(names[:5]) + (f" and {len(names) - 5} more" * (len(names) > 5)),
        )
