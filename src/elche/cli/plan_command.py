"""``elche plan pipeline``: the partition and schedule for a model on some devices."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from elche.cli.files import (
    check_outputs,
    csv_option,
    json_option,
    read_toml,
    write_csv,
    write_json,
)
from elche.errors import ConfigError
from elche.schedule.drawing import draw, legend
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.pipeline_file import (
    PIPELINE_FILE_FORMAT,
    read_pipeline_file,
)
from elche.schedule.planning.plan import PlanConfig, figures, summary
from elche.schedule.planning.planner import plan_pipeline


@click.group()
def plan() -> None:
    """Estimate the cost of training on some devices, and find the best plan."""


@plan.command(epilog="\b\n" + PIPELINE_FILE_FORMAT.replace("\n\n", "\n\n\b\n"))
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--microbatches", type=int, help="Microbatches per step; default: the file's."
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
    help="Stages per device of the interleaved schedules.",
)
@click.option("--all-devices", is_flag=True, help="Leave no device without layers.")
@json_option
@csv_option
def pipeline(
    path: Path,
    microbatches: int | None,
    schedule: str,
    stages_per_device: int,
    all_devices: bool,
    json_path: str | None,
    csv_path: Path | None,
) -> None:
    """Plan a pipeline: which layers on which device, in which schedule.

    The TOML file PATH holds the model and the devices, see below. The plan has the
    shortest step that fits every device's memory. The costs of the other schedules are
    printed beside it.
    """
    check_outputs(json_path, csv_path)
    profile, count = read_toml(path, read_pipeline_file)
    count = count if microbatches is None else microbatches
    if count is None:
        raise ConfigError(
            "give the number of --microbatches, or microbatches = ... in the file"
        )
    config = PlanConfig(
        num_microbatches=count,
        schedule=schedule,
        stages_per_device=stages_per_device,
        use_all_devices=all_devices,
    )
    found = plan_pipeline(profile, config)
    chosen = found.chosen
    write_csv(csv_path, chosen.schedule)
    write_json(json_path, figures(found, profile))
    if json_path != "-":
        width = shutil.get_terminal_size((100, 24)).columns
        print(draw(chosen.schedule, chosen.timing, chosen.costs, width))
        print(legend(chosen.schedule))
        print(summary(found, profile))
