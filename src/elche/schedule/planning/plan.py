"""A plan and its parts: the planner's question and answer."""

from __future__ import annotations

from dataclasses import dataclass

from elche.errors import ConfigError
from elche.schedule.actions import Schedule
from elche.schedule.costs import PipelineCosts
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.partition import Partition, ProfileTable
from elche.schedule.planning.profile import PipelineProfile
from elche.schedule.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Request to the planner.

    Attributes:
        num_microbatches: of one step.
        schedule: ``auto``, or one of `FIXED_SCHEDULES`.
        stages_per_device: of the interleaved schedules.
        use_all_devices: give every device at least one layer.
    """

    num_microbatches: int
    schedule: str = "auto"
    stages_per_device: int = 2
    use_all_devices: bool = False

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ConfigError(
                f"a step needs at least one microbatch, got {self.num_microbatches}"
            )
        if self.schedule not in (*FIXED_SCHEDULES, "auto"):
            raise ConfigError(
                f"expected a schedule among {', '.join(FIXED_SCHEDULES)} and auto, got "
                f"{self.schedule!r}"
            )
        if self.stages_per_device < 1:
            raise ConfigError(
                f"expected at least one stage per device, got {self.stages_per_device}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule on a partition, timed.

    Attributes:
        name: of the schedule.
        partition: layers of each stage; its ranks are the schedule's.
        schedule: compute only.
        costs: in seconds and bytes, memory limits included.
        timing: of the schedule.
        step_s: predicted time of a step: the makespan, or the busiest link's time.
        state_bytes: parameters and their state, of each rank.
        missing_bytes: by which the rank that lacks most misses its memory; 0 if none.
    """

    name: str
    partition: Partition
    schedule: Schedule
    costs: PipelineCosts
    timing: Timing
    step_s: float
    state_bytes: tuple[float, ...]
    missing_bytes: float = 0.0

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Most that each rank holds: parameters, their state, and activations."""
        return tuple(
            state + peak
            for state, peak in zip(
                self.state_bytes, self.timing.peak_activations, strict=True
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Cost of another schedule, with the best partition found for it.

    Attributes:
        name: of the schedule.
        candidate: None where it cannot run at all.
        reason: why it cannot run, or what memory it lacks; empty if it fits.
    """

    name: str
    candidate: Candidate | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a step.

    Attributes:
        chosen: what to run.
        alternatives: every published schedule, and auto, by name.
        equal_split: 1F1B on the same number of layers per device, for comparison; None
            where there are fewer layers than devices or the memory does not hold it.
        unused: indices of the devices without layers.
        ideal_s: all devices busy all the time, at the sum of their speeds.
        bound_s: the least sum-bound found (`best_partition`): with whole layers and one
            stage per device, and without a wait after the first microbatch.
    """

    chosen: Candidate
    alternatives: tuple[Alternative, ...]
    equal_split: Candidate | None
    unused: tuple[int, ...]
    ideal_s: float
    bound_s: float


def ideal_step_s(profile: PipelineProfile, num_microbatches: int) -> float:
    """Time of a step if the work divided as speeds do and nobody ever waited.

    The whole model's work over the sum of the devices' speeds, each of which is one
    over the time that it would need alone.
    """
    table = ProfileTable(profile, num_microbatches)
    layers = len(profile.layers)
    alone = [table.work(each, 0, layers) for each in range(len(profile.devices))]
    return 1 / sum(1 / each for each in alone) if all(alone) else 0.0
