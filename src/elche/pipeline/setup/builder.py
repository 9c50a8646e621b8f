"""Builder of a `Pipeline`: measures, plans, builds stages, agrees with all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import torch

from elche.devices.choice import check_device
from elche.errors import ConfigError
from elche.pipeline.cutting.own_loss import OwnLoss
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.peers.link_probe import measure_links
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline_config import PipelineConfig, pipeline_config
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.replicas.replicas import agree_on_groups
from elche.pipeline.setup.assembly import Blueprint, Parts, assemble
from elche.pipeline.setup.building import LayerList, Split, layers_of
from elche.pipeline.setup.measured_plan import (
    check_measuring,
    memory_limit,
    plan_measured,
)
from elche.pipeline.setup.meta_tensors import MetaTensors
from elche.pipeline.setup.planning import check_asked, make_plan
from elche.pipeline.setup.profiling import LayerMeasurement, profile_layers
from elche.pipeline.step.stepping import Stepping
from elche.runtime.emulation import EmulationConfig
from elche.runtime.process.environment import read_placement
from elche.runtime.process.launchers import launch_facts
from elche.schedule.actions import Schedule

logger = logging.getLogger(__name__)


@final
@dataclass
class PipelineBuilder:
    """Builds a pipeline's stages, together with all ranks.

    The fields are the arguments of `elche.pipeline.Pipeline`.

    Raises:
        ConfigError: a setting is wrong, here or on another rank.
    """

    model: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    micro_batches: int
    schedule: str | Schedule
    devices: Sequence[str] | None
    split: Split | None
    config: InitVar[PipelineConfig | None]
    options: InitVar[Mapping[str, Any]]

    def __post_init__(
        self, config: PipelineConfig | None, options: Mapping[str, Any]
    ) -> None:
        self._placement = read_placement()
        try:
            facts = launch_facts()
            if facts.may_grow and facts.pipe >= 0:  # not Ray's default replacement
                raise ConfigError(
                    "a Pipeline cannot replace ranks that die: run without --rejoin; "
                    "--max-restarts N starts it anew from its last checkpoint"
                )
            self._config = pipeline_config(config, options)
            self._meta = MetaTensors(self._config.init)
        except ConfigError as error:
            if self._placement.world_size > 1:
                StagePeers.decline(self._placement, error)
            raise

    def build(self) -> Stepping:
        """Builds this rank's stages; if that fails, the model is left unchanged.

        Raises:
            ConfigError: an argument is wrong, here or on another rank.
            MismatchError: ranks disagree.
            CommunicationError: the ranks did not connect.
        """
        place, config, peers = self._placement, self._config, None
        if place.world_size > 1:
            peers = StagePeers.join(place, config.timeout_s)
        ranks = PipelineCommunicator(place.rank, peers, config.timeout_s)
        # A rank that fails also ends the run for the others.
        with ranks.ending_on_failure(), self._meta.undone_on_failure():
            groups = agree_on_groups(config.replicas, place, ranks)
            times: list[Any] = []
            if config.costs == "measure":
                measure = partial(self._measure, peers)
                times = ranks.gather(measure, "measuring the layers")
                echo = partial(measure_links, peers, groups.members, config.timeout_s)
                links = ranks.gather(echo, "measuring the links")
                times = [(*each, own) for each, own in zip(times, links, strict=True)]
            parts = ranks.build(lambda: self._build(groups, peers, times), groups)
            return Stepping(ranks, groups, parts)

    @cached_property
    def _layers(self) -> LayerList:
        """The model's layers; cached, because cutting takes seconds."""
        points, sample = self._config.split_points, self._config.sample
        return layers_of(self.model, self.split, points, sample)

    def _device(self) -> torch.device:
        place = self._placement
        if self.devices is None:
            return place.device
        if len(self.devices) != place.world_size:
            raise ConfigError(
                f"expected a device for each of {place.world_size} ranks, got "
                f"{list(self.devices)}"
            )
        return check_device(self.devices[place.rank])

    @property
    def _emulation(self) -> EmulationConfig | None:
        """Emulated speed of this device, with its time per sample and layer."""
        emulation = self._placement.emulation
        return None if emulation is None else emulation.for_layer(len(self._layers))

    def _measure(self, peers: StagePeers | None) -> list[Any]:
        config = self._config
        check_asked(self.schedule, self.micro_batches)
        check_measuring(self.schedule, config)
        device, layers = self._device(), self._layers
        limit = memory_limit(config, self._placement, device, layers)
        given = layers, config.sample, device, self._emulation
        report = () if peers is None else (peers.waits.report,)
        measured = profile_layers(*given, *report)
        return [limit, [asdict(one) for one in measured]]

    def _build(
        self, groups: ReplicaGroups, peers: StagePeers | None, times: Sequence[Any]
    ) -> Parts:
        device, layers, config = self._device(), self._layers, self._config
        wanted, members = self.schedule, groups.members
        unsplit: frozenset[int] = frozenset()
        if times:
            limits, rows, probes = zip(*(times[rank] for rank in members), strict=True)
            measured = [[LayerMeasurement(**one) for one in row] for row in rows]
            own = enumerate(measured[members.index(self._placement.rank)])
            unsplit = frozenset(at for at, one in own if not one.weight_gradient_s)
            assert isinstance(wanted, str), "checked by check_measuring"
            wanted, config = plan_measured(
                *(measured, limits, wanted, self.micro_batches, config),
                [link for links in probes for link in links],
            )
            active = zip(members, wanted.actions, strict=True)
            idle = [rank for rank, row in active if not row]
            if idle and self._placement.rank == members[0]:
                logger.warning(
                    "ranks %s have no layers and idle: by measured costs, layers on "
                    "them would make a step longer",
                    idle,
                )
        plan = make_plan(wanted, self.micro_batches, len(members), len(layers), config)
        plan = replace(plan, schedule=groups.placed(plan.schedule))
        loss_fn = _checked(self.loss_fn, layers, config)
        given = Blueprint(
            *(layers, loss_fn, device, config, layers.ties(), unsplit, self._meta),
            emulation=self._emulation,
        )
        parts = assemble(given, plan, peers)
        if isinstance(self.model, torch.nn.Module):
            self._meta.adopt(self.model)
        return parts


def _checked(
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    layers: LayerList,
    config: PipelineConfig,
) -> Callable[[Any, Any], torch.Tensor]:
    own = getattr(layers.sources[0], "own_loss", None) if loss_fn is None else None
    if isinstance(own, OwnLoss):
        if own.fault and config.weight_of is None and config.loss_reduction == "mean":
            raise ConfigError(
                "loss_fn=None uses the loss that the model computes, which must be a "
                f"mean over labels or samples, and {own.fault}; if it is a mean, pass "
                "weight_of=lambda batch: the count that it is a mean over, or "
                'loss_reduction="sum" if it is divided by a count of the whole step '
                "(a loss that compares samples is neither: it needs the whole batch)"
            )
        return own
    if loss_fn is None or not callable(loss_fn) or isinstance(loss_fn, type):
        raise ConfigError(
            "the last stage needs a loss function of (output, target) that returns a "
            f"scalar, got {loss_fn!r}; None is for a model that is cut by its trace "
            "and has a 'loss' in its output: give labels in sample="
        )
    if isinstance(loss_fn, torch.nn.Module):
        learning = [n for n, p in loss_fn.named_parameters() if p.requires_grad]
        if learning:
            raise ConfigError(
                f"loss_fn has trainable parameters ({', '.join(learning[:3])}), which "
                "no stage holds: they would be in no state_dict and no norm; make that "
                "part the last layer, or freeze them with requires_grad_(False)"
            )
    return loss_fn
