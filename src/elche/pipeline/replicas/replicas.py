"""Replicas of a pipeline: data parallelism over pipelines.

Each replica is a pipeline on its own ranks, with its own batches. Replicas may differ
in the number of ranks, partition, schedule and microbatches; the model is the same.
They start equal, every step sums their gradients (`elche.pipeline.replicas.reduction`),
and they apply the same optimizer steps. So they stay bitwise equal if their devices are
of one kind. Stages of one pipeline that share a parameter, such as a language model's
embedding, treat it the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import final

import torch
from torch import nn

from elche.comm.transport.messages import Message
from elche.comm.transport.shared_memory import may_share_memory
from elche.pipeline.peers.communicator import PipelineCommunicator, common
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.reduction import GradientReduction
from elche.pipeline.replicas.replica_buffers import SharedBuffers
from elche.pipeline.replicas.replica_groups import (
    Grouping,
    ReplicaGroups,
    group_ranks,
)
from elche.pipeline.replicas.replica_units import (
    BUFFER,
    FROZEN,
    LEARNS,
    HeldLayer,
    Unit,
    check_equal,
    plan_units,
)
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.stage import Layer
from elche.runtime.process.environment import Placement


def agree_on_groups(
    replicas: Grouping, placement: Placement, communicator: PipelineCommunicator
) -> ReplicaGroups:
    """Determines the replicas, which all ranks must specify equally.

    Raises:
        ConfigError: see `group_ranks`; on every rank.
        MismatchError: ranks have specified different replicas; on every rank.
    """

    def ranks() -> list[list[int]]:
        made = group_ranks(replicas, placement.rank, placement.world_size)
        return [list(members) for members in made.ranks]

    with communicator.closing_on_failure():
        reports = communicator.agree(ranks, "sharing out the ranks among replicas")
        found = common(reports, "assignment of ranks to replicas")
    return ReplicaGroups(tuple(map(tuple, found)), placement.rank)


@final
@dataclass
class Replicas:
    """All replicas, as this rank uses them; made by :meth:`join`.

    Attributes:
        groups: ranks of each replica.
        counts: microbatches of each replica.
        reduction: gradient reduction; None if no parameter is on several ranks.
        buffers: this rank's shared buffers.
        frozen: this rank's parameters that were frozen when the replicas joined.
    """

    groups: ReplicaGroups
    counts: Sequence[int]
    reduction: GradientReduction | None
    buffers: Sequence[SharedBuffers] = ()
    frozen: Sequence[tuple[str, nn.Parameter]] = ()

    @staticmethod
    def join(
        groups: ReplicaGroups,
        parts: Parts,
        communicator: PipelineCommunicator,
        timeout_s: float,
        are_equal: bool,
    ) -> Replicas:
        """Makes parameters of several ranks equal, and connects these ranks.

        Call it on all ranks. Copies the first replica's values, unless they are already
        equal, or become equal at the end of a call that some ranks have finished.

        Raises:
            MismatchError: replicas have different models; on every rank.
            CommunicationError: the ranks did not connect.
        """
        count = parts.plan.schedule.num_microbatches
        peers = communicator.peers
        may_share = groups.are_several or parts.given.ties
        if peers is None or not may_share:
            return Replicas(groups, [count] * len(groups.ranks), None)
        layers = parts.given.layers  # a shared parameter has its first use's name
        names = {
            use: layers.name_of(*uses[0]) for uses in parts.given.ties for use in uses
        }
        held, by_rank = _agree_on_layers(groups, parts, communicator, names)
        learning, frozen, kept = (
            [unit for unit in plan_units(held, role) if len(unit.ranks) > 1]
            for role in (LEARNS, FROZEN, BUFFER)
        )
        parameters = {
            names.get((index, own), layer.prefixed(own)): one
            for index, layer in parts.built.items()
            for own, one in layer.module.named_parameters()
        }
        places = {
            layer.prefixed(own): (layer.module, own)
            for layer in parts.built.values()
            for own, _ in layer.module.named_buffers()
        }
        with communicator.ending_on_failure():
            tensors = {name: one.get_buffer(own) for name, (one, own) in places.items()}
            tensors |= parameters
            for unit in () if are_equal else (*learning, *frozen, *kept):
                _make_equal(unit, groups, tensors, peers, timeout_s)
            wanted = [unit.ranks for unit in (*learning, *kept)]
            shares = parts.given.device.type == "cpu" and may_share_memory()
            formed = peers.form_groups(wanted, shares, timeout_s)
            here = [unit for unit in learning if peers.rank in unit.ranks]
            reduction = GradientReduction(here, parameters, formed, peers)
        parts.executor.after_stage = reduction.stage_is_through
        counts = [by_rank[members[0]] for members in groups.ranks]
        for runner in parts.stages.values():
            # Microbatches are numbered across replicas, so that dropout seeds differ.
            runner.stage.first_microbatch = sum(counts[: groups.index])
        shared = [
            SharedBuffers(
                formed[unit.ranks], unit.ranks, [places[name] for name in unit.names]
            )
            for unit in kept
            if peers.rank in unit.ranks
        ]
        fixed = {name for unit in frozen for name in unit.names}
        return Replicas(
            *(groups, counts, reduction, shared),
            [one for one in parameters.items() if one[0] in fixed],
        )

    @property
    def copies(self) -> frozenset[int]:
        """Ids of this rank's parameters that a lower rank also holds."""
        return frozenset() if self.reduction is None else self.reduction.copies

    def average_buffers(
        self, communicator: PipelineCommunicator, timeout_s: float
    ) -> None:
        """Averages buffers changed by training; must be called on all ranks.

        See `elche.pipeline.replicas.replica_buffers`.
        """
        if self.buffers and communicator.peers is not None:
            with communicator.ending_on_failure():
                for one in self.buffers:
                    one.average(communicator.peers, timeout_s)

    def late_learner(self) -> str:
        """Error text for a parameter that was unfrozen after :meth:`join`; else ""."""
        for name, one in self.frozen:
            if one.requires_grad:
                return (
                    f"parameter {name} on rank {self.groups.rank} was frozen when the "
                    "ranks that hold it were joined, and learns now; make another "
                    "Pipeline after unfreezing"
                )
        return ""

    def losses(self, by_rank: Sequence[list[float]]) -> list[list[float]]:
        """Losses of each replica's microbatches."""
        return [
            next((by_rank[rank] for rank in members if by_rank[rank]), [])
            for members in self.groups.ranks
        ]


def _agree_on_layers(
    groups: ReplicaGroups,
    parts: Parts,
    communicator: PipelineCommunicator,
    names: dict[tuple[int, str], str],
) -> tuple[list[list[HeldLayer]], list[int]]:
    """Gathers the layers and the number of microbatches of each rank."""
    mine = [
        astuple(_describe(parts, index, layer, names))
        for index, layer in sorted(parts.built.items())
    ]
    report = [parts.plan.schedule.num_microbatches, mine]
    reports = communicator.exchange(report, "comparing the replicas")
    held = [[HeldLayer(*one) for one in layers] for _, layers in reports]
    with communicator.closing_on_failure():
        check_equal(held, groups)
    return held, [count for count, _ in reports]


def _describe(
    parts: Parts, index: int, layer: Layer, names: dict[tuple[int, str], str]
) -> HeldLayer:
    stage = next(s for s in parts.stages if index in parts.plan.layers_of(s))
    buffers = dict(layer.module.named_buffers())
    tensors = {}
    for own, one in (*layer.module.named_parameters(), *buffers.items()):
        role = BUFFER if own in buffers else LEARNS if one.requires_grad else FROZEN
        name = names.get((index, own), layer.prefixed(own))
        tensors[name] = f"{role} {list(one.shape)} {one.dtype}"
    return HeldLayer(index, stage, parts.executor.finished_at(stage), tensors)


def _make_equal(
    unit: Unit,
    groups: ReplicaGroups,
    tensors: Mapping[str, torch.Tensor],
    peers: StagePeers,
    timeout_s: float,
) -> None:
    """Copies the first replica's values of a unit to the other ranks."""
    if peers.rank not in unit.ranks:
        return
    source = next(rank for rank in groups.ranks[0] if rank in unit.ranks)
    for name in unit.names:
        one, what = tensors[name].detach(), f"{name} of the first replica"
        if peers.rank == source:
            for rank in unit.ranks:
                if rank != source:
                    peers.send(rank, Message((one,)), timeout_s, what)
            continue
        (value,) = peers.receive(source, timeout_s, what).tensors
        if not torch.equal(one.cpu(), value):
            one.copy_(value)
