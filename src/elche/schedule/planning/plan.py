"""A plan and its parts: the planner's input and output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from elche.config_checks import check_whole
from elche.schedule.actions import Schedule, check_microbatches
from elche.schedule.costs import PipelineCosts
from elche.schedule.generators.schedules import check_name
from elche.schedule.planning.partition import HALF_BYTE, Partition, ProfileTable
from elche.schedule.planning.profile import PipelineProfile
from elche.schedule.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Request to the planner.

    Attributes:
        num_microbatches: microbatches per step.
        schedule: ``auto``, or one of `FIXED_SCHEDULES`.
        stages_per_device: stages per device of the interleaved schedules.
        use_all_devices: whether every device gets at least one layer.
    """

    num_microbatches: int
    schedule: str = "auto"
    stages_per_device: int = 2
    use_all_devices: bool = False

    def __post_init__(self) -> None:
        check_microbatches(self.num_microbatches)
        if self.schedule != "auto":
            check_name(self.schedule)
        check_whole("stages_per_device", self.stages_per_device, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A timed schedule on a partition.

    Attributes:
        name: the schedule's name.
        partition: layers of each stage; its ranks are the schedule's.
        schedule: the schedule, compute only.
        costs: costs in seconds and bytes, memory limits included.
        timing: simulated times of the schedule.
        step_s: predicted time of a step: the makespan, or the busiest link's time.
        state_bytes: bytes of parameters, gradients and optimizer state of each rank.
    """

    name: str
    partition: Partition
    schedule: Schedule
    costs: PipelineCosts
    timing: Timing
    step_s: float
    state_bytes: tuple[float, ...]

    @property
    def lacking_bytes(self) -> tuple[float, ...]:
        """Memory shortage of each rank; negative if memory is left."""
        pairs = zip(self.timing.peak_activations, self.costs.limits, strict=True)
        return tuple(peak - limit + HALF_BYTE for peak, limit in pairs)

    @property
    def missing_bytes(self) -> float:
        """Largest memory shortage of a rank; 0 if none."""
        return max(0.0, *self.lacking_bytes)

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Peak memory of each rank: parameters, their state and activations."""
        pairs = zip(self.state_bytes, self.timing.peak_activations, strict=True)
        return tuple(map(sum, pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another schedule, with the best partition found for it.

    Attributes:
        name: the schedule's name.
        candidate: the timed schedule; None if it cannot run at all.
        reason: why it cannot run, or the memory shortage; empty if it fits.
    """

    name: str
    candidate: Candidate | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a step.

    Attributes:
        chosen: the schedule and partition to run.
        alternatives: every published schedule, and auto, by name.
        equal_split: 1F1B on the same number of layers per device, for comparison; None
            if there are fewer layers than devices or the memory is too small.
        unused: indices of the devices without layers.
        ideal_s: step time if all devices were always busy, at the sum of their speeds.
        bound_s: least sum-bound found (`best_partition`): whole layers, one stage per
            device, and no wait after the first microbatch.
    """

    chosen: Candidate
    alternatives: tuple[Alternative, ...]
    equal_split: Candidate | None
    unused: tuple[int, ...]
    ideal_s: float
    bound_s: float


def ideal_step_s(profile: PipelineProfile, num_microbatches: int) -> float:
    """Time of a step if work divided exactly by speed and no device ever waited.

    This is the whole model's work over the sum of the devices' speeds. A device's speed
    is one over its time for the whole model alone.
    """
    table = ProfileTable(profile, num_microbatches)
    layers = len(profile.layers)
    alone = [table.work(each, 0, layers) for each in range(len(profile.devices))]
    return 1 / sum(1 / each for each in alone) if all(alone) else 0.0


SHOWN_RANKS = 32


def figures(plan: Plan, profile: PipelineProfile) -> dict[str, Any]:
    """The plan's figures for JSON output."""
    chosen = plan.chosen
    return {
        "schedule": chosen.schedule.name,
        "microbatches": chosen.schedule.num_microbatches,
        "layers": len(profile.layers),
        "step_time_s": chosen.step_s,
        "makespan_s": chosen.timing.makespan,
        "ideal_s": plan.ideal_s,
        "sum_bound_s": plan.bound_s,
        "bubble_makespan": chosen.timing.bubble_makespan,
        "bubble_span": chosen.timing.bubble_span,
        "placement": list(chosen.schedule.placement),
        "partition": list(chosen.partition.sizes),
        "ranks": [
            _rank_figures(chosen, profile, rank)
            for rank in range(len(chosen.partition.ranks))
        ],
        "unused_devices": [profile.devices[each].name for each in plan.unused],
        "alternatives": [_alternative(each, profile) for each in plan.alternatives],
        "equal_split": (
            None
            if plan.equal_split is None
            else _candidate_figures(plan.equal_split, profile)
        ),
    }


def summary(plan: Plan, profile: PipelineProfile) -> str:
    """Human-readable text of the plan."""
    chosen = plan.chosen
    ratio = (
        f", {chosen.step_s / plan.ideal_s:.3f} times the ideal" if plan.ideal_s else ""
    )
    lines = [
        f"{chosen.schedule.name}: {len(profile.layers)} layers on "
        f"{len(chosen.partition.ranks)} devices, {chosen.schedule.num_stages} stages, "
        f"{chosen.schedule.num_microbatches} microbatches",
        f"step_time_s       {chosen.step_s:.6g} (predicted){ratio}",
        f"ideal_s           {plan.ideal_s:.6g} (all devices always busy)",
        f"sum_bound_s       {plan.bound_s:.6g} (whole layers, one stage per device, no "
        "wait after the first microbatch)",
        f"bubble_makespan   {chosen.timing.bubble_makespan:.4f}",
    ]
    for rank in range(min(len(chosen.partition.ranks), SHOWN_RANKS)):
        one = _rank_figures(chosen, profile, rank)
        parts = ", ".join(
            f"{first} to {last}" if last > first else f"{first}"
            for first, last in one["layers"]
        )
        limit = one["memory_limit_bytes"]
        lines.append(
            f"  rank {rank} {one['device']}: layers {parts}; busy "
            f"{100 * (1 - one['bubble']):.1f} %; memory {_size(one['memory_bytes'])}"
            + (f" of {_size(limit)}" if limit < math.inf else "")
            + f" (state {_size(one['state_bytes'])})"
        )
    if len(chosen.partition.ranks) > SHOWN_RANKS:
        lines.append(f"  and {len(chosen.partition.ranks) - SHOWN_RANKS} ranks more")
    lines += [
        f"  {profile.devices[each].name} gets no layers: the step is no shorter with it"
        for each in plan.unused
    ]
    return "\n".join([*lines, *_table(plan)])


def _table(plan: Plan) -> list[str]:
    """Table of each schedule's cost on its best partition."""
    rows, equal = list(plan.alternatives), plan.equal_split
    if equal is not None:
        missing = equal.missing_bytes
        reason = f"a device lacks {missing:,.0f} bytes" if missing else ""
        name = "1f1b, equal split"
        rows.append(Alternative(name=name, candidate=equal, reason=reason))
    lines = ["alternatives        step_time_s   vs plan   most memory"]
    for each in rows:
        one = each.candidate
        if one is None:
            lines.append(f"  {each.name:<17} -  {each.reason}")
            continue
        ratio = one.step_s / plan.chosen.step_s if plan.chosen.step_s else 1.0
        lines.append(
            f"  {each.name:<17} {one.step_s:>11.6g}   {ratio:>6.3f}x   "
            f"{_size(max(one.memory_bytes)):>11}"
            + (" (the plan)" if one is plan.chosen else "")
            + (f"  does not fit: {each.reason}" if each.reason else "")
        )
    return lines


def _alternative(each: Alternative, profile: PipelineProfile) -> dict[str, Any]:
    known = (
        {} if each.candidate is None else _candidate_figures(each.candidate, profile)
    )
    fits = each.candidate is not None and not each.reason
    return {"schedule": each.name, "fits": fits, "reason": each.reason, **known}


def _candidate_figures(
    candidate: Candidate, profile: PipelineProfile
) -> dict[str, Any]:
    return {
        "step_time_s": candidate.step_s,
        "bubble_makespan": candidate.timing.bubble_makespan,
        "devices": [profile.devices[each].name for each in candidate.partition.ranks],
        "partition": list(candidate.partition.sizes),
        "placement": list(candidate.schedule.placement),
        "memory_bytes": list(candidate.memory_bytes),
        "missing_bytes": candidate.missing_bytes,
    }


def _rank_figures(
    candidate: Candidate, profile: PipelineProfile, rank: int
) -> dict[str, Any]:
    index = candidate.partition.ranks[rank]
    device = profile.devices[index]
    return {
        "rank": rank,
        "device": device.name,
        "layers": [list(each) for each in candidate.partition.layers_of(index)],
        "busy_s": candidate.timing.busy[rank],
        "bubble": candidate.timing.bubble_per_rank[rank],
        "state_bytes": candidate.state_bytes[rank],
        "peak_activation_bytes": candidate.timing.peak_activations[rank],
        "memory_bytes": candidate.memory_bytes[rank],
        "memory_limit_bytes": device.memory_bytes,
    }


def _size(amount: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.2f} {unit}"
    return f"{amount:.0f} B"
