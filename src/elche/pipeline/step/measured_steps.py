"""Measured times of a pipeline's steps, and the faster plan that they advise.

Every rank keeps the same account of all ranks' times. The plan stays as it was made;
one rank logs where another plan would be faster. Ranks are seats here: places in the
order of this replica.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, final

from elche.errors import ConfigError
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.planning import PipelinePlan, known_costs, plan_placed
from elche.schedule.actions import Schedule, StageAction
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.planning.layer_costs import (
    LayerCosts,
    assumed_costs,
    best_sizes,
    corrected,
    stage_costs,
)
from elche.schedule.step_times import (
    StageTimes,
    drift_between,
    measured_costs,
    times_of,
    usual_times,
)
from elche.schedule.timing import simulate

FIRST_STEPS = 2
"""Steps at the start that are not timed: they may compile."""
TIMED_STEPS = 3
"""Steps that are timed in a row then; predictions are made from the last of them."""
LOOK_EVERY = 20
"""Steps from one timed step to the next, later."""
DRIFT = 0.25
"""Change of a stage's share of a step, from that planned for, that asks for a plan."""
ADVISED_GAIN = 0.1
"""Least part of a step that another plan must save to be logged."""

logger = logging.getLogger(__name__)


@final
class MeasuredSteps:
    """The times of one replica's steps.

    Args:
        schedule: as the user gave it; a name, or a schedule.
        plan: that runs.
        config: the settings.
        profiled: what each layer costs on each rank, where that has been measured.
        says: whether this rank writes the log.

    Attributes:
        step_s: predicted time of a step; None until one was timed.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        plan: PipelinePlan,
        config: PipelineConfig,
        profiled: LayerCosts | None,
        says: bool,
    ) -> None:
        is_fixed = isinstance(schedule, Schedule) or schedule.endswith(".csv")
        self._name = None if is_fixed else str(schedule)
        self._plan, self._profiled, self._says = plan, profiled, says
        costs = known_costs(config)
        self._has_costs = costs is not None
        if costs is None or costs.placement != plan.schedule.placement:
            costs = _unit_costs(plan)
        self._planned = self._measured = self._advised = costs
        self.step_s: float | None = None
        self._timed: deque[dict[int, StageTimes]] = deque(maxlen=TIMED_STEPS)
        self._ends_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._steps = 0

    def is_due(self) -> bool:
        """Returns True if the step that begins is to be timed."""
        if self._steps < FIRST_STEPS:
            return False
        return len(self._timed) < TIMED_STEPS or self._steps % LOOK_EVERY == 0

    def report(
        self, trace: Sequence[tuple[StageAction, float, float]], waited: Sequence[float]
    ) -> list[Any]:
        """Times of this rank's stages in a step, for the others."""
        return [[stage, *four] for stage, four in times_of(trace, waited).items()]

    def ended(self) -> None:
        """A training step has ended well."""
        self._steps += 1

    def take(self, reports: Sequence[Any], ends_s: float) -> None:
        """Takes the times of all ranks of a step.

        Args:
            reports: of each.
            ends_s: what the step took before its first action and after its last.
        """
        times: dict[int, StageTimes] = {
            stage: (forward, whole, inputs, weights)
            for report in reports
            for stage, forward, whole, inputs, weights in report
        }
        self._timed.append(times)
        self._ends_s.append(max(0.0, ends_s))
        self._measured = measured_costs(self._planned, usual_times(self._timed))
        makespan_s = simulate(self._plan.schedule, self._measured).makespan
        self.step_s = makespan_s + median(self._ends_s)
        if self._says and self._name and len(self._timed) == TIMED_STEPS:
            self._advise(self._name, self.step_s)

    def layer_costs(self) -> LayerCosts:
        """Cost of each layer on each rank, by the times of steps."""
        placement, sizes = self._plan.schedule.placement, self._plan.partition
        if self._profiled is None:
            return assumed_costs(self._measured, sizes)
        known = replace(self._profiled, memory=())  # it runs, whatever that takes
        planned = stage_costs(known, placement, sizes)
        return corrected(self._profiled, planned, self._measured)

    def _advise(self, schedule: str, step_s: float) -> None:
        """Logs a faster plan, once for each drift of the times."""
        if drift_between(self._advised, self._measured) <= DRIFT:
            return
        self._advised = self._measured
        placement, sizes = self._plan.schedule.placement, self._plan.partition
        count, layers = self._plan.schedule.num_microbatches, self.layer_costs()
        best = best_sizes(layers, placement, sizes, count)
        try:
            costs = stage_costs(layers, placement, best)
            found = plan_placed(schedule, count, best, costs)
        except ConfigError:
            return  # not with this schedule, or not with this memory
        best_s = simulate(found.schedule, costs).makespan + median(self._ends_s)
        if best_s > step_s * (1 - ADVISED_GAIN):
            return
        is_measured = self._profiled is not None or self._has_costs
        is_given = best != sizes and schedule != "auto" and not is_measured
        logger.info(
            "a new plan would be %.0f %% faster: %s predicted to take %.4g s a step "
            "instead of %.4g s; save a checkpoint and resume it with %s",
            100 * (step_s / best_s - 1),
            f"{list(best)} layers on the stages instead of {list(sizes)} are"
            if best != sizes
            else "another schedule of the same stages is",
            *(best_s, step_s),
            f"partition={list(best)}" if is_given else 'costs="measure" and sample=',
        )


def _unit_costs(plan: PipelinePlan) -> PipelineCosts:
    """Equal costs of all layers, where nothing is known."""
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
