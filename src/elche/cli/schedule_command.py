"""``elche schedule``: drawing and cost of a pipeline schedule."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elche.cli.files import (
    check_outputs,
    csv_option,
    json_option,
    read_text,
    write_csv,
    write_json,
)
from elche.config_checks import check_not_negative
from elche.errors import ConfigError
from elche.schedule.actions import Schedule
from elche.schedule.costs import PipelineCosts, RankTimes, equal_costs
from elche.schedule.drawing import draw, legend
from elche.schedule.formats import from_csv
from elche.schedule.generators.auto import auto_placed
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    make_schedule,
    placement_for,
)
from elche.schedule.lowering import check_deadlock_free
from elche.schedule.timing import Timing, simulate

SHOWN_PEAKS = 16
RANKS, MICROBATCHES, TIMES = 4, 8, (1.0, 1.0, 1.0)
"""Defaults of the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Options of ``elche schedule``; its help explains them.

    None means a file's value, or the default in the help.
    """

    name: str
    ranks: int | None = None
    microbatches: int | None = None
    times: tuple[float, float, float] | None = None
    communication: float = 0.0
    memory: float | None = None
    virtual_stages: int | None = None
    json_path: str | None = None
    csv_path: Path | None = None

    def __post_init__(self) -> None:
        names = (*FIXED_SCHEDULES, "auto")
        if self.name not in names and not self.name.endswith(".csv"):
            raise ConfigError(
                f"expected {', '.join(names)}, or a file that ends in .csv, got "
                f"{self.name!r}"
            )
        check_not_negative("--comm", self.communication)
        if self.memory is not None and not self.memory > 0:
            raise ConfigError(f"expected --memory above 0, got {self.memory}")
        if self.times is not None and not any(self.times):
            raise ConfigError("expected --times F,I,W that are not all 0")


def run_schedule(config: ScheduleConfig) -> None:
    """Makes, times, prints and writes a schedule.

    Raises:
        ConfigError: the options are impossible, or a file cannot be read or written.
    """
    check_outputs(config.json_path, config.csv_path)
    schedule, costs = plan(config)
    timing = simulate(schedule, costs)
    _check_memory(schedule, timing, costs)
    write_csv(config.csv_path, schedule)
    write_json(config.json_path, figures(schedule, timing))
    if config.json_path == "-":
        return
    print(draw(schedule, timing, costs, shutil.get_terminal_size((100, 24)).columns))
    print(legend(schedule))
    print(summary(schedule, timing))


def plan(config: ScheduleConfig) -> tuple[Schedule, PipelineCosts]:
    """Makes the requested schedule, and the costs in its placement.

    Raises:
        ConfigError: as `run_schedule`.
    """
    times = RankTimes(*(config.times or TIMES), config.communication)
    if config.name.endswith(".csv"):
        path = Path(config.name)
        schedule = from_csv(read_text(path), name=path.stem)
        for what, asked, found in (
            ("ranks", config.ranks, schedule.num_ranks),
            ("microbatches", config.microbatches, schedule.num_microbatches),
        ):
            if asked not in (None, found):
                raise ConfigError(
                    f"{config.name} is for {found} {what}, not for --{what} {asked}"
                )
        placement, ranks = schedule.placement, schedule.num_ranks
        if schedule.is_lowered:
            check_deadlock_free(schedule)
        return schedule, equal_costs(times, placement, ranks, config.memory)
    count, ranks = config.microbatches or MICROBATCHES, config.ranks or RANKS
    if config.name == "auto":
        most = config.virtual_stages or 2
        return auto_placed(times, ranks, count, config.memory, most)
    placement = placement_for(config.name, ranks, config.virtual_stages)
    costs = equal_costs(times, placement, ranks, config.memory)
    return make_schedule(config.name, costs, count), costs


def figures(schedule: Schedule, timing: Timing) -> dict[str, Any]:
    """The schedule's figures for JSON output."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "makespan": timing.makespan,
        "bubble_makespan": timing.bubble_makespan,
        "bubble_span": timing.bubble_span,
        "peak_activations": list(timing.peak_activations),
        "bubble_per_rank": list(timing.bubble_per_rank),
        "spans": list(timing.spans),
    }


def summary(schedule: Schedule, timing: Timing) -> str:
    """Human-readable text of the figures."""
    shown = [f"{peak:g}" for peak in timing.peak_activations[:SHOWN_PEAKS]]
    more = schedule.num_ranks - len(shown)
    peaks = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return "\n".join(
        [
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} "
            f"stages, {schedule.num_microbatches} microbatches",
            f"makespan          {timing.makespan:.6g}",
            f"bubble_makespan   {timing.bubble_makespan:.4f}  (the step ends in a "
            "synchronisation)",
            f"bubble_span       {timing.bubble_span:.4f}  (of each rank's own first to "
            "last action)",
            f"peak_activations  {peaks}",
        ]
    )


def _check_memory(schedule: Schedule, timing: Timing, costs: PipelineCosts) -> None:
    """Checks a schedule from a file against the memory limits."""
    for rank, limit in enumerate(costs.memory):
        peak = timing.peak_activations[rank]
        if peak > limit + 1e-9:
            raise ConfigError(
                f"{schedule.name} holds up to {peak:g} units of activations on rank "
                f"{rank}, above its memory limit of {limit:g}"
            )


def _times(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[float, float, float] | None:
    """Parses ``1,1,1``."""
    if text is None:
        return None
    try:
        forward, inputs, weights = (float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"expected three numbers F,I,W such as 1,1,1, got {text!r}"
        ) from error
    return forward, inputs, weights


@click.command()
@click.argument("name")
@click.option(
    "--ranks", type=click.IntRange(1), help="Ranks of the pipeline (default: 4)."
)
@click.option(
    "--microbatches", type=click.IntRange(1), help="Microbatches per step (default: 8)."
)
@click.option(
    "--times",
    callback=_times,
    help="F,I,W: time of forward, input and weight gradient of one rank's part of the"
    " model, for one microbatch (default: 1,1,1). Where a rank holds several stages,"
    " each takes its share.",
)
@click.option(
    "--comm",
    "communication",
    type=float,
    default=0.0,
    show_default=True,
    help="Time of a message between ranks; overlaps computation.",
)
@click.option(
    "--memory",
    type=float,
    help="Most activations that a rank may hold, in microbatches of a whole rank.",
)
@click.option(
    "--virtual-stages",
    type=click.IntRange(1),
    help="Stages per rank of the interleaved schedules and gpipe (default: 2 and 1);"
    " the most that auto tries (default: 2).",
)
@json_option
@csv_option
def schedule(**settings: Any) -> None:
    """Draw the pipeline schedule NAME and print its costs.

    NAME is gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, interleaved-zb, v-half,
    v-min, auto (the least makespan within --memory), or a CSV file of actions. Stages
    are equal; `elche plan pipeline` schedules unequal layers.
    """
    run_schedule(ScheduleConfig(**settings))
