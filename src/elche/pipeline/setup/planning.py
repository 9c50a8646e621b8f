"""Choice of schedule and stages from the user's settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.pipeline.pipeline_config import PipelineConfig
from elche.schedule.actions import Schedule, loop_placement, v_placement
from elche.schedule.costs import PipelineCosts, RankTimes, equal_costs
from elche.schedule.formats import from_csv
from elche.schedule.generators.auto import auto_schedule
from elche.schedule.generators.schedules import make_schedule, placement_for
from elche.schedule.lowering import check_deadlock_free, lower

_EQUAL = RankTimes(forward=1.0, input_gradient=1.0, weight_gradient=1.0)


@dataclass(frozen=True)
class PipelinePlan:
    """Schedule, partition and placement of a pipeline.

    Attributes:
        schedule: lowered, deadlock-free schedule.
        partition: number of layers of each stage.
    """

    schedule: Schedule
    partition: tuple[int, ...]

    def layers_of(self, stage: int) -> range:
        """Indices of a stage's layers."""
        begin = sum(self.partition[:stage])
        return range(begin, begin + self.partition[stage])


def make_plan(
    schedule: str | Schedule,
    micro_batches: int,
    num_ranks: int,
    num_layers: int,
    config: PipelineConfig,
) -> PipelinePlan:
    """Resolves names and defaults into a plan."""
    check_asked(schedule, micro_batches)
    if num_layers < 1:
        raise ConfigError("the model has no layers")
    if isinstance(schedule, Schedule):
        made = schedule
    elif schedule.endswith(".csv"):
        made = _read_csv(Path(schedule))
    else:
        costs = config.costs
        if costs is None or isinstance(costs, str):
            placement = _placement(schedule, num_ranks, num_layers, config)
            costs = equal_costs(_EQUAL, placement, num_ranks)
        make = auto_schedule if schedule == "auto" else partial(make_schedule, schedule)
        made = make(costs, micro_batches)
    if made.num_ranks != num_ranks:
        raise ConfigError(
            f"schedule {made.name} is for {made.num_ranks} ranks, but {num_ranks} run"
        )
    if made.num_microbatches != micro_batches:
        raise ConfigError(
            f"schedule {made.name} is for {made.num_microbatches} microbatches, but "
            f"micro_batches is {micro_batches}"
        )
    if made.is_lowered:
        check_deadlock_free(made)
    else:
        costs = config.costs if isinstance(config.costs, PipelineCosts) else None
        fits = costs is not None and costs.placement == made.placement
        made = lower(made, costs if fits else None)
    return PipelinePlan(made, _partition(made.num_stages, num_layers, config))


def check_asked(schedule: object, micro_batches: object) -> None:
    """Checks the types of schedule and microbatches."""
    check_whole("micro_batches", micro_batches, 1)
    if not isinstance(schedule, (str, Schedule)):
        raise ConfigError(
            "expected the name of a schedule, the path of a CSV file as text, or a "
            f"Schedule, got {schedule!r}"
        )


def _read_csv(path: Path) -> Schedule:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    return from_csv(text, path.stem)


def _placement(
    name: str, num_ranks: int, num_layers: int, config: PipelineConfig
) -> tuple[int, ...]:
    if name != "auto":
        return placement_for(name, num_ranks, config.stages_per_rank)
    each = config.stages_per_rank
    if each is None and config.partition is not None:
        each = max(1, len(config.partition) // num_ranks)
    if num_ranks > 1 and num_layers >= 2 * num_ranks and each in (None, 2):
        return v_placement(num_ranks)
    return loop_placement(num_ranks, each or 1)


def _partition(
    num_stages: int, num_layers: int, config: PipelineConfig
) -> tuple[int, ...]:
    if config.partition is not None:
        if len(config.partition) != num_stages or sum(config.partition) != num_layers:
            raise ConfigError(
                f"expected a partition of {num_layers} layers into {num_stages} stages,"
                f" got {list(config.partition)}"
            )
        return config.partition
    if num_stages > num_layers:
        raise ConfigError(
            f"the schedule has {num_stages} stages, but the model has only "
            f"{num_layers} layers; take fewer ranks, fewer stages per rank, or more "
            "layers (of a module: name submodules to cut before in split_points=)"
        )
    each, rest = divmod(num_layers, num_stages)
    return tuple(each + (stage < rest) for stage in range(num_stages))
