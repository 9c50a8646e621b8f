"""Changes of a pipeline between steps: its schedule and partition.

Ranks exchange their measurements with the message that ends a step. A change that one
replica then wants is sent with the next step, and carried out by all ranks before the
one after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.pipeline.checkpoints.loader_passes import LoaderPasses
from elche.pipeline.moving.moving_optimizers import (
    GivenOptimizers,
    OptimizerGroups,
    as_optimizers,
)
from elche.pipeline.moving.repartition import Repartition, Terms
from elche.pipeline.moving.replanning import Change, Planner
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.peers.patience import Forecast
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.setup.assembly import Blueprint, Parts, rescheduled
from elche.pipeline.setup.measured_plan import layer_costs_of
from elche.pipeline.setup.planning import PipelinePlan
from elche.pipeline.setup.profiling import (
    LayerMeasurement,
    as_message,
    profile_layers,
)
from elche.pipeline.step.executor import Executor

_UNCHANGED, _RESCHEDULES, _MOVES = range(3)
"""What ranks want before the next step; a larger one outranks the others."""

logger = logging.getLogger(__name__)


@final
class Changes:
    """One rank's part in them.

    Args:
        planner: of this replica.
        groups: the replicas.
        communicator: all ranks.
        timeout_s: deadline of each wait.
        moves_by_itself: whether layers may move without being asked.
    """

    def __init__(
        self,
        planner: Planner,
        groups: ReplicaGroups,
        communicator: PipelineCommunicator,
        timeout_s: float,
        moves_by_itself: bool,
    ) -> None:
        self.planner = planner
        self.optimizers: tuple[torch.optim.Optimizer, ...] | None = None
        self.passes = LoaderPasses()
        self._groups, self._communicator = groups, communicator
        self._timeout_s = timeout_s
        self._moves_by_itself = moves_by_itself
        self._pending: Change | None = None
        self._agreed = _UNCHANGED

    def repartition(
        self,
        parts: Parts,
        partition: Sequence[int] | None,
        placement: Sequence[int] | None,
        optimizer: GivenOptimizers,
    ) -> Parts:
        """Moves layers; see `Pipeline.repartition`."""
        made: list[tuple[Change, OptimizerGroups]] = []

        def plan() -> None:
            found = self.optimizers if optimizer is None else as_optimizers(optimizer)
            if found is None:
                raise ConfigError(
                    "repartition needs optimizer=, whose state moves with the "
                    "parameters; give () where nothing is trained"
                )
            made.append((self._target(partition, placement), OptimizerGroups(found)))

        self._communicator.agree(plan, "repartition")
        moved = self._move(parts, *made[0])
        assert moved is not None, "there is no limit"
        return moved

    def profile(self, given: Blueprint, sample: Any) -> list[list[LayerMeasurement]]:
        """Times the layers on all ranks for later plans; see `Pipeline`."""

        def measure() -> list[list[float]]:
            if sample is None:
                raise ConfigError(
                    "profile_layers needs sample=, one microbatch of the input, on "
                    "every rank"
                )
            return as_message(profile_layers(given.layers, sample, given.device))

        told = self._communicator.agree(measure, "profile_layers")
        mine = [told[rank] for rank in self._groups.members]
        self.planner.learn(layer_costs_of(mine))
        return [[LayerMeasurement(*one) for one in rows] for rows in told]

    def report(self, executor: Executor, is_timed: bool) -> list[Any]:
        """The report to the other ranks at the end of a step."""
        wanted = _UNCHANGED
        if self._pending is not None:
            wanted = _MOVES if self._pending.moves else _RESCHEDULES
        times, span_s = None, 0.0
        if is_timed:
            trace = executor.trace
            times = self.planner.report(trace, executor.waited_s)
            span_s = trace[-1][2] - trace[0][1] if trace else 0.0  # no layers here
        wants_cut = self.passes.pauses.wants_cut()
        return [wanted, self.optimizers is not None, times, wants_cut, span_s]

    def look(self, reports: Sequence[Any], duration_s: float) -> Forecast | None:
        """Takes the other ranks' times, and what they want to change.

        Args:
            reports: of all ranks.
            duration_s: of the step, with what comes before and after its actions.

        Returns:
            What steps will take, if times have come.
        """
        self.planner.ended()
        self._agreed = max(one[0] for one in reports)
        self.passes.step_done(wants_cut=reports[0][3])
        mine = [reports[rank] for rank in self._groups.members]
        times, ends_s = [one[2] for one in mine], duration_s - max(x[4] for x in mine)
        if self._pending is not None or any(one is None for one in times):
            return None
        may_move = self._moves_by_itself and all(one[1] for one in reports)
        self._pending = self.planner.take(times, ends_s, may_move)
        return self.planner.forecast

    def carry_out(self, parts: Parts) -> Parts | None:
        """Changes what all ranks know to be wanted; with all ranks, between steps.

        Args:
            parts: of this rank.

        Returns:
            The new ones; None where nothing changes.
        """
        change, agreed = self._pending, self._agreed
        if agreed == _UNCHANGED:
            return None
        self._pending, self._agreed = None, _UNCHANGED
        if agreed == _MOVES:
            kept = Change(self.planner.plan, self.planner.costs)
            assert self.optimizers is not None, "every rank has said so"
            return self._move(parts, change or kept, OptimizerGroups(self.optimizers))
        if change is None:
            return parts  # another replica's schedule: what they have in common is new
        self.planner.adopt(change)
        return rescheduled(parts, self._placed(change.plan), self._communicator.peers)

    def _target(
        self, partition: Sequence[int] | None, placement: Sequence[int] | None
    ) -> Change:
        if partition is None:
            return self.planner.best()
        if placement is None:
            return self.planner.place(partition)
        members = self._groups.members
        if any(rank not in members for rank in placement):
            raise ConfigError(
                f"expected ranks among {list(members)} as the placement, got "
                f"{list(placement)}"
            )
        return self.planner.place(partition, [members.index(one) for one in placement])

    def _move(
        self, parts: Parts, change: Change, optimizers: OptimizerGroups
    ) -> Parts | None:
        plan, members = self._placed(change.plan), self._groups.members
        unsplit = self.planner.unsplit(members.index(self._communicator.rank))
        parts = replace(parts, given=replace(parts.given, unsplit=unsplit))
        asked = Repartition(parts, plan, optimizers, self._communicator, members)
        moved = asked.carry_out(Terms(self._timeout_s, change.most_bytes))
        if moved is None:
            logger.info(
                "layers stay where they are: moving them would not be won back soon"
            )
            return None
        self._pending, self._agreed = None, _UNCHANGED
        self.planner.adopt(change)
        return moved

    def _placed(self, plan: PipelinePlan) -> PipelinePlan:
        return replace(plan, schedule=self._groups.placed(plan.schedule))
