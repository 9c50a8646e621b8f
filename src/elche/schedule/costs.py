"""Costs of a pipeline's stages and links: the input of timing and of `auto`.

Times are in any one unit. Activation memory is in units of one microbatch on one rank:
the whole model's activations of a microbatch, divided by the number of ranks. With
stages of equal size, each of a rank's v stages holds 1/v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elche.config_checks import check_fields, check_not_negative
from elche.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of one stage on its device, for one microbatch.

    Attributes:
        forward: time of F.
        input_gradient: time of I.
        weight_gradient: time of W.
        backward: time of B, the whole backward at once; None means I + W.
        activation: units of memory held from F to B or W; I frees nothing. (In the ZB
            paper, W of a transformer layer needs 32h of the 34h + 5as in memory.)
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float | None = None
    activation: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, not_negative=self.__dataclass_fields__, group="a stage's ")

    @property
    def full_backward(self) -> float:
        """Time of B."""
        if self.backward is None:
            return self.input_gradient + self.weight_gradient
        return self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Stages on ranks, the links between them, and the ranks' memory.

    Attributes:
        stages: costs in the model's order.
        placement: the rank of each stage.
        num_ranks: number of ranks; a rank may hold no stage.
        links: time of a message between stages s and s + 1, in either direction; one
            entry fewer than stages, empty means 0. Unused between stages of one rank.
            Links have no queue: messages overlap each other and computation, as in the
            ZB paper.
        memory: units of activations that each rank may hold; empty means no limit.
    """

    stages: tuple[StageCost, ...]
    placement: tuple[int, ...]
    num_ranks: int
    links: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or self.num_ranks < 1:
            raise ConfigError(
                f"a pipeline needs at least one stage and one rank, got "
                f"{len(self.stages)} stages on {self.num_ranks} ranks"
            )
        if len(self.placement) != len(self.stages):
            raise ConfigError(
                f"expected a rank for each of {len(self.stages)} stages, got "
                f"{len(self.placement)} ranks"
            )
        if not all(0 <= rank < self.num_ranks for rank in self.placement):
            raise ConfigError(
                f"the placement {list(self.placement)} names a rank outside 0 to "
                f"{self.num_ranks - 1}"
            )
        if len(self.links) not in (0, len(self.stages) - 1):
            raise ConfigError(
                f"expected a time for each of {len(self.stages) - 1} links between "
                f"stages, got {len(self.links)}"
            )
        for time in self.links:
            check_not_negative("the time of a link", time)
        if len(self.memory) not in (0, self.num_ranks):
            raise ConfigError(
                f"expected a memory limit for each of {self.num_ranks} ranks, got "
                f"{len(self.memory)}"
            )
        for limit in self.memory:
            if not limit > 0:
                raise ConfigError(f"memory limits must be above 0, got {limit}")

    @property
    def limits(self) -> tuple[float, ...]:
        """Memory limit of each rank, infinite if unlimited."""
        return self.memory or (math.inf,) * self.num_ranks

    def link(self, stage: int) -> float:
        """Time of a message between `stage` and the next one."""
        if not self.links or self.placement[stage] == self.placement[stage + 1]:
            return 0.0
        return self.links[stage]


def renumbered(costs: PipelineCosts) -> tuple[PipelineCosts, tuple[int, ...]]:
    """Renumbers the ranks by their first stages; also returns their old numbers.

    Published schedules then fit any order of the devices. Ranks without a stage are
    dropped.
    """
    order = tuple(dict.fromkeys(costs.placement))
    number = {rank: new for new, rank in enumerate(order)}
    limits = tuple(costs.memory[rank] for rank in order) if costs.memory else ()
    placement = tuple(number[rank] for rank in costs.placement)
    return (
        replace(costs, placement=placement, num_ranks=len(order), memory=limits),
        order,
    )


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of one rank's part of the model for one microbatch: F, I, W.

    Attributes:
        forward: time of F.
        input_gradient: time of I.
        weight_gradient: time of W.
        communication: time of a message between ranks.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    communication: float = 0.0


def equal_costs(
    times: RankTimes,
    placement: Sequence[int],
    num_ranks: int,
    memory: float | None = None,
) -> PipelineCosts:
    """Costs of equal ranks, with the work divided evenly among the stages.

    With v stages per rank each stage takes 1/v of the rank's times. `memory` limits
    each rank's units of memory; None means no limit.
    """
    share = num_ranks / len(placement) if placement else 1.0
    stage = StageCost(
        forward=times.forward * share,
        input_gradient=times.input_gradient * share,
        weight_gradient=times.weight_gradient * share,
        activation=share,
    )
    return PipelineCosts(
        stages=(stage,) * len(placement),
        placement=tuple(placement),
        num_ranks=num_ranks,
        links=(times.communication,) * max(len(placement) - 1, 0),
        memory=() if memory is None else (memory,) * num_ranks,
    )
