"""Units of gradient reduction that the replicas of a pipeline share.

A unit is a set of parameters on the same ranks, whose gradients are complete at the
same time: after the last weight gradient of the stages that use them. If all replicas
have the same partition, units are stages. If partitions differ, a unit is the
intersection of a stage of one replica with a stage of another. A parameter shared by
several stages is its own unit, over all ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elche.errors import MismatchError
from elche.pipeline.replicas.replica_groups import ReplicaGroups

LEARNS, FROZEN, BUFFER = "learns", "is frozen", "is a buffer"


@dataclass(frozen=True)
class HeldLayer:
    """A rank's description of one of its layers.

    Attributes:
        index: layer's index in the model.
        stage: stage of the layer.
        finished_at: position of the stage's last weight gradient in the rank's actions.
        tensors: role, shape and dtype of each parameter and buffer, by the model's
            name; a shared parameter has the name of its first use.
    """

    index: int
    stage: int
    finished_at: int
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Unit:
    """Parameters whose gradients are summed together.

    Attributes:
        ranks: ranks that hold the parameters, ascending.
        stages: stages that must be complete, on each of these ranks.
        names: names of the parameters, in the model's order.
    """

    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Stages that must be complete on a rank."""
        return self.stages[self.ranks.index(rank)]


def check_equal(held: Sequence[Sequence[HeldLayer]], groups: ReplicaGroups) -> None:
    """Raises unless all replicas hold the same layers.

    Raises:
        MismatchError: replicas differ; the same message on every rank names where.
    """
    first, *others = (
        {layer.index: (rank, layer.tensors) for rank in members for layer in held[rank]}
        for members in groups.ranks
    )
    for number, other in enumerate(others, 1):
        if first.keys() != other.keys():
            raise MismatchError(
                f"replicas disagree about the model: replica 0 has {len(first)} "
                f"layers, replica {number} has {len(other)}; use one model for all"
            )
        for index in sorted(first):
            (rank, mine), (there, theirs) = first[index], other[index]
            for name in sorted(mine.keys() | theirs.keys()):
                one, two = (have.get(name, "is not there") for have in (mine, theirs))
                if one != two:
                    raise MismatchError(
                        f"replicas disagree about layer {index}: {name} {one} on rank "
                        f"{rank} of replica 0, and {two} on rank {there} in replica "
                        f"{number}; use one model for all"
                    )


def plan_units(held: Sequence[Sequence[HeldLayer]], role: str = LEARNS) -> list[Unit]:
    """Groups parameters of a role into units, in the common order of reduction.

    Units are sorted by ranks, then by their time of completion on the first rank.
    """
    users: dict[str, dict[int, set[int]]] = {}
    layer_of: dict[str, int] = {}
    finished_at: dict[tuple[int, int], int] = {}
    for rank, layers in enumerate(held):
        for layer in layers:
            finished_at[rank, layer.stage] = layer.finished_at
            for name, described in layer.tensors.items():
                if described.startswith(role):
                    stages = users.setdefault(name, {}).setdefault(rank, set())
                    stages.add(layer.stage)
                    layer_of[name] = min(layer_of.get(name, layer.index), layer.index)
    together: dict[tuple[Any, Any], list[str]] = {}
    for name in sorted(users, key=lambda name: (layer_of[name], name)):
        ranks = tuple(sorted(users[name]))
        stages_of = tuple(tuple(sorted(users[name][rank])) for rank in ranks)
        together.setdefault((ranks, stages_of), []).append(name)

    def order(unit: Unit) -> tuple[Any, ...]:
        rank = unit.ranks[0]
        complete_at = max(finished_at[rank, stage] for stage in unit.stages[0])
        return unit.ranks, complete_at, layer_of[unit.names[0]], unit.names[0]

    units = [Unit(ranks, of, tuple(names)) for (ranks, of), names in together.items()]
    return sorted(units, key=order)
