"""Assignment of ranks to the replicas of a pipeline, and their shares of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elche.errors import ConfigError
from elche.pipeline.step.outputs import microbatch_sizes
from elche.schedule.actions import Schedule

Grouping: TypeAlias = int | Sequence[Sequence[int]]


@dataclass(frozen=True)
class ReplicaGroups:
    """Ranks of the run, by replica.

    Attributes:
        ranks: ranks of each replica, in the pipeline's order; each rank of the run is
            in one replica.
        rank: this rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def are_several(self) -> bool:
        """True if there is more than one replica."""
        return len(self.ranks) > 1

    @property
    def index(self) -> int:
        """Index of this rank's replica."""
        return self.replica_of(self.rank)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this rank's replica."""
        return self.ranks[self.index]

    def replica_of(self, rank: int) -> int:
        """Index of the replica that a rank belongs to."""
        return next(i for i, members in enumerate(self.ranks) if rank in members)

    def without_lost(
        self, schedule: Schedule, kept: Sequence[int]
    ) -> tuple[ReplicaGroups, Schedule]:
        """Groups and this replica's `placed` schedule, with renumbered ranks."""
        number = {rank: new for new, rank in enumerate(kept)}
        groups = (members for members in self.ranks if members[0] in number)
        ranks = tuple(tuple(number[rank] for rank in members) for members in groups)
        placed = schedule.renumbered(number, len(kept))
        return ReplicaGroups(ranks, number[self.rank]), placed

    def placed(self, schedule: Schedule) -> Schedule:
        """Maps a schedule over this replica's ranks to the run's ranks.

        Ranks of other replicas get no actions.
        """
        number = dict(enumerate(self.members))
        return schedule.renumbered(number, sum(map(len, self.ranks)))


def group_ranks(replicas: Grouping, rank: int, world_size: int) -> ReplicaGroups:
    """Assigns the ranks to the replicas.

    `replicas` is the number of replicas, which then have equally many consecutive ranks
    each; or a list of each replica's ranks, in the order of its pipeline.
    """
    if isinstance(replicas, int):
        each, rest = divmod(world_size, replicas)
        if rest or not each:
            raise ConfigError(
                f"{world_size} ranks cannot be divided evenly among {replicas} "
                f"replicas of a pipeline; run a multiple of {replicas} ranks, or name "
                "the ranks of each replica, such as replicas=[[0, 1], [2]]"
            )
        starts = range(0, world_size, each)
        replicas = [range(start, start + each) for start in starts]
    ranks = tuple(tuple(members) for members in replicas)
    if sorted(one for members in ranks for one in members) != list(range(world_size)):
        raise ConfigError(
            f"expected each of the ranks 0 to {world_size - 1} in one replica, got "
            f"replicas={[list(members) for members in ranks]}"
        )
    return ReplicaGroups(ranks, rank)


@dataclass(frozen=True)
class ReplicaShares:
    """Microbatches of all replicas in one step.

    Attributes:
        sizes: samples of each microbatch, per replica; empty for a replica without a
            batch in this step.
        index: index of this rank's replica.
        reduction: reduction of the loss, "mean" or "sum".
        counts: elements in each microbatch's mean, per replica; None means samples.
    """

    sizes: tuple[list[int], ...]
    index: int
    reduction: str
    counts: Sequence[Sequence[float]] | None = None

    @property
    def mine(self) -> list[int]:
        """Samples of this replica's microbatches."""
        return self.sizes[self.index]

    def weights(self, replica: int, scale: float = 1.0) -> list[float]:
        """Weight of each microbatch's loss in the loss over all replicas' batches."""
        counts = self.counts or self.sizes
        if self.reduction == "sum":
            return [scale] * len(counts[replica])
        total = sum(map(sum, counts)) or 1.0  # if the sum is 0, all weights are 0
        return [scale * count / total for count in counts[replica]]

    def loss(self, by_replica: Sequence[Sequence[float]]) -> float | None:
        """Loss over all replicas' batches; None if there are no losses."""
        active = [i for i, sizes in enumerate(self.sizes) if sizes]
        without = [i for i in active if not by_replica[i]]
        if len(without) == len(active):
            return None
        if without:
            raise ConfigError(
                f"replica {without[0]} has a batch without a target, and others have "
                "one; give targets on all replicas or on none"
            )
        terms = [
            weight * loss
            for i in active
            for weight, loss in zip(self.weights(i), by_replica[i], strict=True)
            if weight  # the mean of no elements may be NaN
        ]
        return sum(terms) if terms else math.nan


def read_shares(
    reports: Sequence[tuple[int | None, int | None]],
    groups: ReplicaGroups,
    counts: Sequence[int],
    reduction: str,
    needs_target: bool,
) -> ReplicaShares:
    """Computes a step's shares from the ranks' reported batch sizes.

    `reports` has each rank's samples of batch and target: None if there is none, -1 for
    a target with an unknown number. `counts` has each replica's number of microbatches.

    Raises:
        ConfigError: batch and target of a replica do not match, or no replica has a
            batch. The same on every rank.
    """
    sizes: list[list[int]] = []
    for index, members in enumerate(groups.ranks):
        own = [reports[rank] for rank in members]
        total = next((one for one, _ in own if one is not None), None)
        labelled = next((one for _, one in own if one is not None), None)
        if groups.are_several and not total:
            if labelled and (total is None or labelled > 0):
                raise ConfigError(
                    f"replica {index} has a target but no batch; give both, or neither "
                    "in a step without a batch"
                )
            sizes.append([])
            continue
        assert total is not None, "the communicator has checked it"
        if needs_target and labelled is None:
            raise ConfigError(
                f"replica {index} has a batch but no target; give the target on the "
                "rank of its last stage"
            )
        known = None if labelled == -1 else labelled
        sizes.append(microbatch_sizes(total, known, counts[index]))
    if not any(sizes):
        raise ConfigError("no replica has a batch; give at least one of them a batch")
    return ReplicaShares(tuple(sizes), groups.index, reduction)
