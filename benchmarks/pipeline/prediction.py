"""What a step of `benchmarks.pipeline` should take, from a profile of another step.

The declared times leave out what a call of a stage and a message cost on this machine.
Elche's last warm-up step is a profile of both; the measured steps come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.pipeline.plan import COMPUTE, BenchPlan
from elche.schedule.actions import Kind, StageAction, parse_action
from elche.schedule.timing import Timing, simulate

_NEXT = {
    Kind.FORWARD: (1, (Kind.FORWARD,)),
    Kind.BACKWARD_INPUT: (-1, (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)),
    Kind.FULL_BACKWARD: (-1, (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)),
}


def predict(plan: BenchPlan, profiles: Sequence[Sequence[Sequence[Any]]]) -> Timing:
    """Times the plan's schedule under the profile.

    Args:
        plan: what runs.
        profiles: of each rank, its actions in order: text, begin, begin and end of the
            work in it, on one clock.
    """
    seen: dict[StageAction, tuple[float, float, float]] = {}
    for rows in profiles:
        latest: StageAction | None = None
        for text, begin_s, work_s, end_s in rows:
            one = parse_action(text)
            if one.kind in COMPUTE:
                seen[one] = (begin_s, work_s, end_s)
                latest = one
            elif latest is not None:  # a message: the rank is not free before its end
                seen[latest] = (*seen[latest][:2], end_s)
    works: dict[tuple[int, Kind], list[float]] = {}
    for one, (_, work_s, end_s) in seen.items():
        works.setdefault((one.stage, one.kind), []).append(end_s - work_s)
    stages = []
    for index, stage in enumerate(plan.costs.stages):
        declared = {
            Kind.FORWARD: stage.forward,
            Kind.BACKWARD_INPUT: stage.input_gradient,
            Kind.BACKWARD_WEIGHT: stage.weight_gradient,
            Kind.FULL_BACKWARD: stage.full_backward,
        }
        found = {
            kind: fmean(works.get((index, kind), [value]))
            for kind, value in declared.items()
        }
        stages.append(
            replace(
                stage,
                forward=found[Kind.FORWARD],
                input_gradient=found[Kind.BACKWARD_INPUT],
                weight_gradient=found[Kind.BACKWARD_WEIGHT],
                backward=found[Kind.FULL_BACKWARD],
            )
        )
    links = _links(plan, seen)
    return simulate(
        plan.schedule, replace(plan.costs, stages=tuple(stages), links=links)
    )


def _links(
    plan: BenchPlan, seen: dict[StageAction, tuple[float, float, float]]
) -> tuple[float, ...]:
    """By link, the mean time of messages that somebody was waiting for.

    What a rank's own send takes counts in its work and not here; where nobody ever
    waited, the plan's own time stands.
    """
    count = len(plan.costs.stages) - 1
    found: list[list[float]] = [[] for _ in range(count)]
    for one, (_, _, end_s) in seen.items():
        step, kinds = _NEXT.get(one.kind, (0, ()))
        for kind in kinds:
            there = seen.get(StageAction(one.stage + step, kind, one.microbatch))
            if there is not None and there[0] < end_s:
                time_s = max(0.0, there[1] - end_s)
                found[min(one.stage, one.stage + step)].append(time_s)
    return tuple(
        fmean(times) if times else plan.costs.link(link)
        for link, times in enumerate(found)
    )
