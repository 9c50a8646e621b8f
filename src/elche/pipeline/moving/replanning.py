"""The plan of a running pipeline: its measured inputs, and its renewal.

Every rank keeps the same account of all ranks' times and so decides the same; nothing
here talks to anybody. Ranks are seats here: places in the order of this replica.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

from elche.errors import ConfigError
from elche.pipeline.peers.patience import Forecast
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.planning import PipelinePlan, known_costs, plan_placed
from elche.schedule.actions import Schedule, StageAction
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.drift import (
    DriftWatch,
    Replan,
    StageTimes,
    arrivals,
    drift_between,
    measured_costs,
    replan,
    times_of,
    usual_times,
)
from elche.schedule.planning.layer_costs import (
    LayerCosts,
    assumed_costs,
    best_sizes,
    best_stages,
    check_sizes,
    corrected,
    stage_costs,
)
from elche.schedule.timing import simulate

FIRST_STEPS = 2
"""Steps of a plan that are not looked at: they may compile."""
TIMED_STEPS = 3
"""So many in a row are timed then, and the last so many make the forecast."""
SUGGESTED_GAIN = 0.1
PAYBACK_STEPS = 200
ASSUMED_BYTES_PER_S = 100e6
"""A move is cheap if its time at this rate is won back in so many steps."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """What the next step begins with.

    Attributes:
        plan: what runs then.
        costs: of its stages.
        moves: whether layers move.
        most_bytes: that any rank may send for it.
        places: the rank of each place from then on, where counts of layers are given
            for them.
    """

    plan: PipelinePlan
    costs: PipelineCosts
    moves: bool = False
    most_bytes: float = float("inf")
    places: tuple[int, ...] | None = None


@final
class Planner:
    """Keeps the plan of this replica.

    Args:
        schedule: as the user gave it; a name, or a schedule.
        plan: that runs.
        config: the settings.
        profiled: what each layer costs on each rank, where that has been measured;
            its memory limits hold for all later plans.
        says: whether this rank writes the log.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        plan: PipelinePlan,
        config: PipelineConfig,
        profiled: LayerCosts | None,
        says: bool,
    ) -> None:
        given = isinstance(schedule, Schedule) or schedule.endswith(".csv")
        self._wanted = plan.schedule if given else schedule
        self._config = config
        self._says = says
        self.profiled = profiled
        self._limits = () if profiled is None else profiled.memory
        self.places = plan.schedule.placement
        costs = known_costs(config)
        if costs is None or costs.placement != self.places:
            costs = _unit_costs(plan)
        self.plan, self.costs = plan, costs
        self.measured: PipelineCosts | None = None
        self.forecast: Forecast | None = None
        self._watch = DriftWatch(costs, config.drift_threshold)
        self._timed: deque[dict[int, StageTimes]] = deque(maxlen=TIMED_STEPS)
        self._ends_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._steps = 0

    def adopt(self, change: Change) -> None:
        """The change has been carried out."""
        self.places = change.places or self.places
        self.plan, self.costs = change.plan, change.costs
        self.measured, self.forecast, self._steps = None, None, 0
        self._timed.clear()
        self._ends_s.clear()
        self._watch = DriftWatch(change.costs, self._config.drift_threshold)

    def place(
        self, sizes: Sequence[int], placement: Sequence[int] | None = None
    ) -> Change:
        """The plan for given counts of layers.

        Args:
            sizes: layers of each place, 0 for one that is to have none.
            placement: the rank of each place; None takes the places of the beginning,
                or of the last time that they were given.

        Raises:
            ConfigError: the counts are no partition, or the schedule is not defined
                for the stages that are left, or a rank's memory does not hold them.
        """
        places = self.places if placement is None else tuple(placement)
        num_ranks, num_layers = self.plan.schedule.num_ranks, sum(self.plan.partition)
        check_sizes(sizes, places, num_layers, num_ranks)
        used = [(rank, size) for rank, size in zip(places, sizes, strict=True) if size]
        ranks, kept = zip(*used, strict=True)
        costs = stage_costs(self.layer_costs(), ranks, kept)
        plan = plan_placed(self._wanted, self._num_microbatches, kept, costs)
        return Change(plan, costs, moves=True, places=places)

    def best(self) -> Change:
        """The plan of least predicted step time over all ranks.

        Raises:
            ConfigError: the schedule was given as a file or a schedule.
        """
        if isinstance(self._wanted, Schedule):
            raise ConfigError(
                f"schedule {self._wanted.name} was given for its stages; give the "
                "counts of layers for them, or make the pipeline with the name of a "
                "schedule"
            )
        found = best_stages(
            self.layer_costs(),
            self._num_microbatches,
            self._wanted,
            self._config.stages_per_rank or 2,
        )
        return self.place(found[1], found[0])

    def layer_costs(self) -> LayerCosts:
        """What each layer costs on each rank: measured, or the best guess."""
        sizes = self.plan.partition
        if self.profiled is None:
            return assumed_costs(self.measured or self.costs, sizes)
        if self.measured is None:
            return self.profiled
        known = replace(self.profiled, memory=())  # it runs, whatever that takes
        planned = stage_costs(known, self.plan.schedule.placement, sizes)
        return corrected(self.profiled, planned, self.measured)

    def unsplit(self, seat: int) -> frozenset[int]:
        """Layers whose backward runs whole on a rank, by what was measured there."""
        rows = () if self.profiled is None else self.profiled.by_rank[seat]
        return frozenset(i for i, one in enumerate(rows) if not one.weight_gradient)

    def is_due(self) -> bool:
        """Whether the times of the step that begins are wanted."""
        every = self._config.replan_every
        if self._steps < FIRST_STEPS:
            return False
        is_new = len(self._timed) < TIMED_STEPS
        return is_new or (every > 0 and self._steps % every == 0)

    def report(
        self, trace: Sequence[tuple[StageAction, float, float]], waited: Sequence[float]
    ) -> list[Any]:
        """What this rank's stages took in a step, for the others."""
        return [[stage, *four] for stage, four in times_of(trace, waited).items()]

    def ended(self) -> None:
        """A training step has ended well."""
        self._steps += 1

    def learn(self, profiled: LayerCosts) -> None:
        """Takes new profiles of the layers; messages take what they took before."""
        link = profiled.link if self.profiled is None else self.profiled.link
        self.profiled = replace(profiled, link=link, memory=self._limits)
        self.measured = None
        self._timed.clear()

    def take(
        self, reports: Sequence[Any], ends_s: float, may_move: bool
    ) -> Change | None:
        """Takes the times of all ranks of a step.

        Args:
            reports: of each.
            ends_s: what the step took before its first action and after its last.
            may_move: whether layers may move without being asked.

        Returns:
            What to change for the next step, if anything.
        """
        times: dict[int, StageTimes] = {
            stage: (forward, whole, inputs, weights)
            for report in reports
            for stage, forward, whole, inputs, weights in report
        }
        self._timed.append(times)
        self._ends_s.append(max(0.0, ends_s))
        self.measured = measured_costs(self.costs, usual_times(self._timed))
        arrivals_s, makespan_s = arrivals(self.plan.schedule, self.measured)
        self.forecast = Forecast(arrivals_s, makespan_s + median(self._ends_s))
        if not self._config.replan_every or len(self._timed) < TIMED_STEPS:
            return None
        planned = self._watch.planned
        drifted = self._watch.observe(self.measured)  # so one odd step is no drift
        if drifted is None:
            return None
        change = self._answer(drift_between(planned, drifted), drifted)
        return self._better_partition(drifted, change, may_move) or change

    def _answer(self, drift: float, costs: PipelineCosts) -> Change | None:
        """The schedule for drifted times, if that is another."""
        running = self.plan.schedule
        if self._wanted == "auto":
            found = replan(running, costs)
        else:
            kept = simulate(running, costs).makespan
            found = Replan(schedule=None, kept_makespan=kept, makespan=kept)
        self._say(
            "a stage's share of the time differs by %.0f %% from the plan; %s is "
            "predicted to take %.4g s a step now%s",
            *(100 * drift, running.name, found.kept_makespan),
            f"; re-planned: {found.schedule.name} takes {found.makespan:.4g} s"
            if found.schedule is not None
            else ", and stays",
        )
        if found.schedule is None:
            return None
        wanted, sizes = found.schedule, self.plan.partition
        plan = plan_placed(wanted, self._num_microbatches, sizes, costs)
        return Change(plan, costs)

    def _better_partition(
        self, costs: PipelineCosts, change: Change | None, may_move: bool
    ) -> Change | None:
        """Says which partition would be better; takes it where it may."""
        schedule, sizes = self.plan.schedule, self.plan.partition
        runs = schedule if change is None else change.plan.schedule
        makespan = simulate(runs, costs).makespan
        if isinstance(self._wanted, Schedule):
            return None
        layers, count = self.layer_costs(), schedule.num_microbatches
        best = best_sizes(layers, schedule.placement, sizes, count)
        if best == sizes:
            return None
        try:
            found = replace(self.place(best, schedule.placement), places=None)
        except ConfigError:
            return None  # not with this schedule, or not with this memory
        predicted = simulate(found.plan.schedule, found.costs).makespan
        if predicted > makespan * (1 - SUGGESTED_GAIN):
            return None
        self._say(
            "%s layers on the stages instead of %s are predicted to take %.4g s a "
            "step instead of %.4g s; %s",
            *(list(best), list(sizes), predicted, makespan),
            "they move before the next steps if that is cheap"
            if may_move
            else f"pipe.repartition({list(best)}, optimizer=optimizer) moves them, "
            "auto_repartition=True with pipe.register_optimizer(optimizer) does it by "
            "itself",
        )
        if not may_move:
            return None
        gain_s = makespan - predicted
        return replace(found, most_bytes=gain_s * PAYBACK_STEPS * ASSUMED_BYTES_PER_S)

    @property
    def _num_microbatches(self) -> int:
        return self.plan.schedule.num_microbatches

    def _say(self, text: str, *values: object) -> None:
        if self._says:
            logger.info(text, *values)


def _unit_costs(plan: PipelinePlan) -> PipelineCosts:
    """Where nothing is known, all layers are alike."""
    share = plan.schedule.num_ranks / sum(plan.partition)
    return PipelineCosts(
        stages=tuple(
            StageCost(
                forward=size,
                input_gradient=size,
                weight_gradient=size,
                activation=size * share,
            )
            for size in plan.partition
        ),
        placement=plan.schedule.placement,
        num_ranks=plan.schedule.num_ranks,
    )
