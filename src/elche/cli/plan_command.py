"""``elche plan pipeline``: the partition and schedule for a model on some devices."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elche.errors import ConfigError
from elche.schedule.drawing import draw, legend
from elche.schedule.formats import to_csv
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.pipeline_file import (
    PIPELINE_FILE_FORMAT,
    PipelineFile,
    read_pipeline_file,
)
from elche.schedule.planning.plan import PlanConfig
from elche.schedule.planning.plan_report import figures, summary
from elche.schedule.planning.planner import plan_pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPipelineConfig:
    """What ``elche plan pipeline`` was asked.

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
    # Here, because they import rich and matplotlib, and every command of elche imports
    # this module.
    from elche.cli.plan_plot import check_suffix, plot_schedule
    from elche.monitor.results import check_writable, to_json_text

    if config.draw_path is not None:
        check_suffix(config.draw_path)
    for path in (config.json_path, config.draw_path, config.csv_path):
        if path is not None and str(path) != "-":
            check_writable(Path(path))
    read = load_plan_file(config.path)
    plan = plan_pipeline(read.profile, _planner_config(config, read))
    chosen = plan.chosen
    as_json = to_json_text(figures(plan, read.profile))
    if config.draw_path is not None:
        names = [read.profile.devices[each].name for each in chosen.partition.ranks]
        plot_schedule(chosen, names, config.draw_path)
    if config.csv_path is not None:
        text = to_csv(chosen.schedule)
        config.csv_path.write_text(text, encoding="utf-8", newline="")
    if config.json_path == "-":
        sys.stdout.write(as_json)
        return
    if config.json_path is not None:
        Path(config.json_path).write_text(as_json, encoding="utf-8")
    width = shutil.get_terminal_size((100, 24)).columns
    print(draw(chosen.schedule, chosen.timing, chosen.costs, width))
    print(legend(chosen.schedule))
    print(summary(plan, read.profile))


def load_plan_file(path: Path) -> PipelineFile:
    """Reads a plan file.

    Raises:
        ConfigError: it cannot be read, or says something impossible.
    """
    try:
        return read_pipeline_file(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _planner_config(config: PlanPipelineConfig, read: PipelineFile) -> PlanConfig:
    count = read.microbatches if config.microbatches is None else config.microbatches
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
@click.option("--json", "json_path", help="File for the figures; - is standard output.")
@click.option(
    "--draw",
    "draw_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for a picture of the schedule, .svg or .png.",
)
@click.option(
    "--csv",
    "csv_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the schedule, which torch.distributed.pipelining can load.",
)
def pipeline(**settings: Any) -> None:
    """Plan a pipeline: which layers on which device, in which schedule.

    The TOML file PATH holds the model and the devices, see below. The plan has the
    shortest step that fits every device's memory; what the other schedules would cost
    is told beside it.
    """
    try:
        run_plan_pipeline(PlanPipelineConfig(**settings))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
