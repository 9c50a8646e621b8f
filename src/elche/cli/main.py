"""The command line: run, demo, doctor, simulate and more."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import click

from elche import __version__
from elche.cli.files import (
    check_outputs,
    csv_option,
    json_option,
    read_toml,
    write_csv,
    write_json,
)
from elche.cli.run_command import rank_options
from elche.cli.run_command import run as run_command
from elche.cli.schedule_command import schedule as schedule_command
from elche.config import POLICIES
from elche.config_checks import check_positive
from elche.errors import ConfigError, ElcheError
from elche.monitor.results import log_to_stderr
from elche.schedule.drawing import draw, legend
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.pipeline_file import (
    PIPELINE_FILE_FORMAT,
    read_pipeline_file,
)
from elche.schedule.planning.plan import PlanConfig, figures, summary
from elche.schedule.planning.planner import plan_pipeline

_HOSTS = (
    "`elche run` starts the ranks of one machine. Start several machines by torchrun, "
    "on each with its --node-rank: `ELCHE_LISTEN=auto torchrun --nnodes 2 "
    "--node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500 "
    "script.py`, or by Slurm: `ELCHE_LISTEN=auto srun --ntasks 5 python script.py` "
    "(docs/hosts.md)"
)
REMOVED = {
    **dict.fromkeys(("join", "witness"), _HOSTS),
    **{
        f"run --{name}": _HOSTS
        for name in (
            *("nnodes", "node-rank", "rendezvous", "hosts", "listen"),
            *("witness", "advertise", "key-file"),
        )
    },
    "schedule --stages": "`elche plan pipeline FILE` schedules unequal layers",
    "plan pipeline --draw": "the terminal shows the schedule, and --csv FILE writes it",
    "bench": "run `python -m benchmarks.hetero` (links, pipeline, chaos) in a clone of "
    "elche's repository",
}
"""Removed commands and options, with the replacement."""


class _Friendly(click.Group):
    """Reports elche's own errors as one message, and Ctrl-C by its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            command = error.ctx.command_path.split(" ")[1:] if error.ctx else []
            _refuse_removed(" ".join([*command, error.option_name]))
            raise
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except ElcheError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        _refuse_removed(args[0])
        return super().resolve_command(ctx, args)


def _refuse_removed(what: str) -> None:
    if what in REMOVED:
        raise click.UsageError(f"`elche {what}` was removed: {REMOVED[what]}")


@click.group(cls=_Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elche")
def main() -> None:
    """Train one PyTorch model on mismatched hardware, at the sum of its speeds."""


@main.command()
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True),
    help="File or directory to train on; default: the standard library's sources.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("elche-demo"),
    show_default=True,
    help="Directory for the table, the trace and the picture.",
)
@click.option(
    "--seconds",
    type=float,
    default=14.0,
    show_default=True,
    help="Training time of both devices together; the demo takes about 12 times it.",
)
def demo(text: Path | None, out: Path, seconds: float) -> None:
    """Train a small GPT on two unequal devices: alone, with PyTorch, with elche."""
    check_positive("--seconds", seconds)
    from elche.demo.demo import DemoConfig, run_demo

    with log_to_stderr():
        run_demo(DemoConfig(out=out, text=text, seconds=seconds))


@main.command()
@click.argument("cluster", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@json_option
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the timeline (Chrome trace, as of a real run).",
)
@click.option(
    "--policy", type=click.Choice(POLICIES), help="Policy, instead of the file's."
)
@click.option(
    "--story",
    "stories",
    multiple=True,
    metavar="WHAT",
    help="Print the event log after the run: all, rank:1, or lease:12 (which rank got "
    "the 13th batch of the last epoch; lease:0/12: of epoch 0). It holds the last "
    "50000 messages and decisions. May be repeated.",
)
def simulate(cluster: Path, **settings: Any) -> None:
    """Simulate the run that the TOML file CLUSTER describes."""
    from elche.cli.sim_command import run_simulate

    with log_to_stderr():
        code = run_simulate(cluster, **settings)
    sys.exit(code)


@main.command()
@rank_options
@click.option(
    "--parameters",
    type=click.IntRange(1000, 1_000_000_000),
    default=2_400_000,
    show_default=True,
    help="Parameters of the test network, a chain of equal linear layers.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Samples of a global batch.",
)
@json_option
def doctor(
    nproc: int | None,
    devices: tuple[str, ...] | None,
    speeds: tuple[float, ...] | None,
    **settings: Any,
) -> None:
    """Measure devices and links, predict policies, and list problems."""
    from elche.cli.doctor_command import run_doctor
    from elche.runtime.process.launch_config import LaunchConfig

    with log_to_stderr():
        ranks = LaunchConfig(
            command=(), num_ranks=nproc, devices=devices, speeds=speeds
        )
        code = run_doctor(ranks, **settings)
    sys.exit(code)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--at",
    default="",
    metavar="HOST:PORT",
    help="Address to listen on; default: a free port of 127.0.0.1.",
)
@click.option("--with-parent", is_flag=True, hidden=True)
def page(folder: Path, at: str, with_parent: bool) -> None:
    """Show the run whose events are in FOLDER in a browser, live or afterwards.

    Prints the page's address, and serves it until Ctrl-C.
    """
    try:
        from elche.monitor.page.server import serve_page
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs {error.name}: pip install 'elche[page]'"
        ) from error
    if with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    # Flushed: a launcher reads it from a pipe.
    serve_page(folder, at, partial(print, flush=True))


def _end_with_parent() -> None:
    """Ends this process when its launcher has: the system closes the pipe."""
    os.read(0, 1)
    os._exit(0)


@main.command()
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write: *.html opens without network, *.png is a picture.",
)
def report(folder: Path, output: Path) -> None:
    """Write the report of the run whose events are in RUN_FOLDER; print its words."""
    from elche.monitor.page.report_file import write_report

    click.echo("\n".join(write_report(folder, output)))
    click.echo(f"elche report: wrote {output}, {output.stat().st_size / 1e6:.1f} MB")


@main.group()
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


main.add_command(run_command)
main.add_command(schedule_command)

if __name__ == "__main__":
    main()
