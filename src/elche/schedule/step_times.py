"""Measured times of a pipeline's steps, in the place of those that were planned with.

A plan depends on how times compare between stages and between F, I and W; a larger
batch makes all of them longer and changes nothing. So drift is measured on shares of
the step's whole time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from elche.errors import ConfigError
from elche.schedule.actions import COMPUTE_KINDS, Kind, StageAction
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.planning.layer_costs import total_of

_KINDS = (Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

StageTimes = tuple[float, float, float, float]
"""Times of F, B, I and W, in this order; 0.0 for one that did not run."""


def times_of(
    trace: Sequence[tuple[StageAction, float, float]], waited: Sequence[float]
) -> dict[int, StageTimes]:
    """Times of one rank's stages in a step: means over the microbatches.

    A step lasts as long as all of them together, the slow first ones too: medians leave
    those out, and forecast too little. A message keeps its rank busy, too; its time
    counts with the computation before it.

    Args:
        trace: each action with begin and end.
        waited: the part of each in which the rank waited for others.
    """
    works: list[list[float]] = []
    keys: list[tuple[int, Kind]] = []
    for (one, begin, end), wait in zip(trace, waited, strict=True):
        work = max(0.0, end - begin - wait)
        if one.kind in COMPUTE_KINDS:
            keys.append((one.stage, one.kind))
            works.append([work])
        elif works:
            works[-1].append(work)
    found: dict[tuple[int, Kind], list[float]] = {}
    for key, parts in zip(keys, works, strict=True):
        found.setdefault(key, []).append(sum(parts))
    return {
        stage: _four([fmean(found.get((stage, kind), [0.0])) for kind in _KINDS])
        for stage in sorted({stage for stage, _ in keys})
    }


def usual_times(steps: Sequence[Mapping[int, StageTimes]]) -> dict[int, StageTimes]:
    """Medians of stage times over several steps, so that no odd step counts.

    Args:
        steps: the times of the same stages in each.
    """
    return {
        stage: _four([median(kind) for kind in zip(*each, strict=True)])
        for stage in steps[0]
        if (each := [one[stage] for one in steps])
    }


def measured_costs(
    planned: PipelineCosts, times: Mapping[int, StageTimes]
) -> PipelineCosts:
    """The costs of a plan with measured times in the place of its own.

    Where only B ran, I and W take the shares of it that the plan gives them; where only
    I and W ran, B takes the plan's share of both. Links keep their proportion to the
    whole.

    Raises:
        ConfigError: a stage was not measured.
    """
    missing = [index for index in range(len(planned.stages)) if index not in times]
    if missing:
        raise ConfigError(f"expected times of all stages, got none of {missing}")
    stages = [_measured(one, times[i]) for i, one in enumerate(planned.stages)]
    before = sum(map(total_of, planned.stages))
    factor = sum(map(total_of, stages)) / before if before else 1.0
    links = tuple(one * factor for one in planned.links)
    return replace(planned, stages=tuple(stages), links=links)


def drift_between(planned: PipelineCosts, measured: PipelineCosts) -> float:
    """The largest change of a stage's share of the whole; 0.5: half as much again."""
    rows = [_parts(planned), _parts(measured)]
    totals = [sum(map(sum, one)) for one in rows]
    if not all(totals):
        return 0.0
    worst = 0.0
    for before, now in zip(*rows, strict=True):
        whole = sum(before) / totals[0]
        changes = [
            b / totals[1] - a / totals[0] for a, b in zip(before, now, strict=True)
        ]
        if whole:
            worst = max(
                worst, abs(sum(changes)) / whole, *(abs(c) / whole for c in changes)
            )
    return worst


def _four(values: Sequence[float]) -> StageTimes:
    forward, whole, inputs, weights = values
    return forward, whole, inputs, weights


def _measured(planned: StageCost, times: StageTimes) -> StageCost:
    forward, whole, inputs, weights = times
    split = planned.input_gradient + planned.weight_gradient
    share = planned.input_gradient / split if split else 0.5
    if not inputs and not weights:
        inputs, weights = whole * share, whole * (1 - share)
    if not whole and planned.backward is not None:
        ratio = planned.backward / split if split else 1.0
        whole = (inputs + weights) * ratio
    return replace(
        planned,
        forward=forward,
        input_gradient=inputs,
        weight_gradient=weights,
        backward=whole or None,
    )


def _parts(costs: PipelineCosts) -> list[tuple[float, float]]:
    """Times of each stage: forward and the rest."""
    return [(one.forward, total_of(one) - one.forward) for one in costs.stages]
