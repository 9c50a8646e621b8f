"""Builder of a `Pipeline`: measurement, plan, stages, agreement of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline_config import PipelineConfig, pipeline_config
from elche.pipeline.replicas.replicas import agree_on_groups
from elche.pipeline.setup.assembly import Blueprint, Parts, assemble, build_layers
from elche.pipeline.setup.building import LayerList, Split, layers_of
from elche.pipeline.setup.links import links_of, measure_links
from elche.pipeline.setup.measured_plan import (
    layer_costs_of,
    plan_measured,
    unsplit_layers,
)
from elche.pipeline.setup.memory import memory_limit
from elche.pipeline.setup.planning import check_asked, make_plan
from elche.pipeline.setup.profiling import (
    LayerMeasurement,
    as_message,
    check_measuring,
    profile_layers,
)
from elche.pipeline.step.measured_steps import MeasuredSteps
from elche.pipeline.step.stepping import Stepping
from elche.runtime.process.environment import Placement, check_device, read_placement
from elche.schedule.actions import Schedule
from elche.schedule.planning.profile import LinkProfile


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of a pipeline: see `elche.pipeline.Pipeline`."""

    model: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    micro_batches: int
    schedule: str | Schedule
    devices: Sequence[str] | None
    split: Split | None

    def device(self, placement: Placement) -> torch.device:
        """Device of this rank.

        Raises:
            ConfigError: there is not one for each rank, or it does not exist.
        """
        if self.devices is None:
            return placement.device
        if len(self.devices) != placement.world_size:
            raise ConfigError(
                f"expected a device for each of {placement.world_size} ranks, got "
                f"{list(self.devices)}"
            )
        return check_device(self.devices[placement.rank])


@final
class PipelineBuilder:
    """Builds a pipeline's stages, together with all ranks.

    Args:
        asked: what is wanted.
        config: its settings.
        placement: which rank this is.
        communicator: all ranks.

    Attributes:
        config: the settings, with what was measured.
        placement: see there.
        communicator: see there.
        groups: the replicas.
    """

    _times: MeasuredSteps

    def __init__(
        self,
        asked: Request,
        config: PipelineConfig,
        placement: Placement,
        communicator: PipelineCommunicator,
    ) -> None:
        self.config, self.placement = config, placement
        self.communicator = communicator
        # Whoever cannot go on ends it for the others, too.
        with communicator.ending_on_failure():
            self.groups = agree_on_groups(
                *(config.replicas, placement.rank, placement.world_size, communicator)
            )
        self._asked = asked

    @staticmethod
    def join(
        asked: Request, config: PipelineConfig | None, options: Mapping[str, Any]
    ) -> PipelineBuilder:
        """Connects this rank with the others.

        Args:
            asked: what is wanted.
            config: the settings as one value...
            options: ...or single ones.

        Raises:
            ConfigError: a setting is wrong, here or on another rank.
            CommunicationError: the ranks did not come together.
        """
        placement, peers = read_placement(), None
        try:
            config = pipeline_config(config, options)
        except ConfigError as error:
            if placement.world_size > 1:
                StagePeers.decline(placement, error)
            raise
        if placement.world_size > 1:
            peers = StagePeers.join(placement, config.timeout_s)
        communicator = PipelineCommunicator(placement.rank, peers, config.timeout_s)
        return PipelineBuilder(asked, config, placement, communicator)

    def build(self) -> Stepping:
        """This rank's stages, ready for steps.

        Raises:
            ConfigError: an argument is wrong, here or on another rank.
            MismatchError: ranks disagree.
        """
        with self.communicator.ending_on_failure():
            told: list[Any] = []
            if self.config.costs == "measure":
                told = self.communicator.gather(self._measure, "measuring the layers")
            links = self._measure_links(told) if told else {}
            parts = self.communicator.build(
                lambda: self._build(told, links), self.groups
            )
            return Stepping(
                self.communicator, self.groups, parts, self._times, self.config
            )

    @cached_property
    def _layers(self) -> LayerList:
        """The model's layers; cutting it takes seconds, so only once."""
        asked, config = self._asked, self.config
        points, sample = config.split_points, config.sample
        return layers_of(asked.model, asked.split, points, sample)

    def _measure(self) -> list[Any]:
        asked, config = self._asked, self.config
        check_asked(asked.schedule, asked.micro_batches)
        check_measuring(asked.schedule, config)
        device = asked.device(self.placement)
        layers = self._layers
        most = memory_limit(config, self.placement, device, layers)
        measured = as_message(profile_layers(layers, config.sample, device))
        return [most, measured, device.type]

    def _measure_links(
        self, told: Sequence[Any]
    ) -> Mapping[tuple[int, int], LinkProfile]:
        """Links between this pipeline's ranks; empty before messages have a route.

        Those from device to device do once the layers are there.
        """
        peers, members = self.communicator.peers, self.groups.members
        if peers is None or any(kind != "cpu" for _, _, kind in told):
            return {}
        largest = max(LayerMeasurement(*one).output_bytes for one in told[0][1])
        mine = measure_links(peers.transport, members, largest, self.config.timeout_s)
        found = self.communicator.exchange(mine, "measuring the links")
        return links_of([found[rank] for rank in members])

    def _build(
        self, told: Sequence[Any], links: Mapping[tuple[int, int], LinkProfile]
    ) -> Parts:
        asked, groups = self._asked, self.groups
        device = asked.device(self.placement)
        layers = self._layers
        wanted = asked.schedule
        mine = [told[rank][1] for rank in groups.members] if told else []
        limits = [told[rank][0] for rank in groups.members] if told else []
        if told and isinstance(wanted, str):
            wanted, self.config = plan_measured(
                *(mine, limits, wanted, asked.micro_batches, self.config, links)
            )
        num_ranks = len(groups.members)
        plan = make_plan(
            wanted, asked.micro_batches, num_ranks, len(layers), self.config
        )
        profiled = layer_costs_of(mine, limits, links) if told else None
        self._times = MeasuredSteps(
            *(asked.schedule, plan, self.config, profiled),
            says=self.placement.rank == groups.members[0],
        )
        plan = replace(plan, schedule=groups.placed(plan.schedule))
        given = Blueprint(
            *(layers, _checked(asked.loss_fn), device, self.config, layers.ties()),
            unsplit_layers(profiled, groups.members.index(self.placement.rank)),
        )
        built = build_layers(given, plan, self.placement.rank)
        return assemble(given, plan, built, self.communicator.peers)


def _checked(
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
) -> Callable[[Any, Any], torch.Tensor]:
    if loss_fn is None or not callable(loss_fn) or isinstance(loss_fn, type):
        raise ConfigError(
            "the last stage needs a loss function of (output, target) that returns a "
            f"scalar, got {loss_fn!r}"
        )
    if isinstance(loss_fn, torch.nn.Module):
        learning = [n for n, p in loss_fn.named_parameters() if p.requires_grad]
        if learning:
            raise ConfigError(
                f"loss_fn has parameters that learn ({', '.join(learning[:3])}), which "
                "no stage holds: they would be in no state_dict and no norm; make that "
                "part the last layer, or freeze them with requires_grad_(False)"
            )
    return loss_fn
