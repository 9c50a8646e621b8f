"""``elche plan pipeline``: the partition and schedule for a model on some devices."""

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
    read_toml,
    write_csv,
    write_json,
)
from elche.cli.plan_plot import check_suffix, plot_schedule
from elche.cli.rank_options import checked
from elche.errors import ConfigError
from elche.schedule.drawing import draw, legend
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.pipeline_file import (
    PIPELINE_FILE_FORMAT,
    read_pipeline_file,
)
from elche.schedule.planning.plan import PlanConfig, figures, summary
from elche.schedule.planning.planner import plan_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPipelineConfig:
    """Options of ``elche plan pipeline``.

    Attributes:
        path: TOML file of model and devices.
        microbatches: instead of the file's.
        schedule: to plan for; ``auto`` takes the shortest step.
        stages_per_device: of the interleaved schedules.
        all_devices: leave no device without layers.
        json_path: where the figures go; "-" is standard output.
        draw_path: where the picture goes.
        csv_path: where the schedule goes.
    """

    path: Path
    microbatches: int | None = None
    schedule: str = "auto"
    stages_per_device: int = 2
    all_devices: bool = False
    json_path: str | None = None
    draw_path: Path | None = None
    csv_path: Path | None = None


def run_plan_pipeline(config: PlanPipelineConfig) -> None:
    """Plans, prints and writes.

    Raises:
        ConfigError: what was asked is impossible, or a file cannot be read or written.
    """
    if config.draw_path is not None:
        check_suffix(config.draw_path)
    check_outputs(config.json_path, config.draw_path, config.csv_path)
    profile, count = read_toml(config.path, read_pipeline_file)
    plan = plan_pipeline(profile, _planner_config(config, count))
    chosen = plan.chosen
    if config.draw_path is not None:
        names = [profile.devices[each].name for each in chosen.partition.ranks]
        plot_schedule(chosen, names, config.draw_path)
    write_csv(config.csv_path, chosen.schedule)
    write_json(config.json_path, figures(plan, profile))
    if config.json_path == "-":
        return
    width = shutil.get_terminal_size((100, 24)).columns
    print(draw(chosen.schedule, chosen.timing, chosen.costs, width))
    print(legend(chosen.schedule))
    print(summary(plan, profile))


def _planner_config(config: PlanPipelineConfig, count: int | None) -> PlanConfig:
    count = count if config.microbatches is None else config.microbatches
    if count is None:
        raise ConfigError(
            "give the number of --microbatches, or microbatches = ... in the file"
        )
    return PlanConfig(
        num_microbatches=count,
        schedule=config.schedule,
        stages_per_device=config.stages_per_device,
        use_all_devices=config.all_devices,
    )


@click.group()
def plan() -> None:
    """Say what training would cost on some devices, and how to do it best."""


@plan.command(epilog="\b\n" + PIPELINE_FILE_FORMAT.replace("\n\n", "\n\n\b\n"))
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--microbatches", type=int, help="Of one step; default: what the file says."
)
@click.option(
    "--schedule",
    type=click.Choice(("auto", *FIXED_SCHEDULES)),
    default="auto",
    show_default=True,
    help="Plan for this schedule; auto takes the shortest step.",
)
@click.option(
    "--stages-per-device",
    type=int,
    default=2,
    show_default=True,
    help="Of the interleaved schedules.",
)
@click.option("--all-devices", is_flag=True, help="Leave no device without layers.")
@json_option
@click.option(
    "--draw",
    "draw_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for a picture of the schedule, .svg or .png.",
)
@csv_option
def pipeline(**settings: Any) -> None:
    """Plan a pipeline: which layers on which device, in which schedule.

    The TOML file PATH holds the model and the devices, see below. The plan has the
    shortest step that fits every device's memory; what the other schedules would cost
    is told beside it.
    """
    with checked():
        run_plan_pipeline(PlanPipelineConfig(**settings))
