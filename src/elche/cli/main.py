"""The command line: run, demo, doctor, simulate and more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from elche import __version__
from elche.cli.files import json_option
from elche.cli.plan_command import plan as plan_command
from elche.cli.rank_options import checked, rank_options
from elche.cli.run_command import REMOVED_COMMANDS, refuse_hosts
from elche.cli.run_command import run as run_command
from elche.cli.schedule_command import schedule as schedule_command
from elche.config import POLICIES
from elche.errors import ElcheError
from elche.monitor.results import log_to_stderr


class _Friendly(click.Group):
    """Shows elche's own errors as one message, and Ctrl-C by its code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ElcheError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in REMOVED_COMMANDS:
            refuse_hosts(f"elche {args[0]}", ctx)
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _as_command() -> Iterator[None]:
    """Wrong settings end with code 2; elche's log is shown."""
    with checked(), log_to_stderr():
        yield


@click.group(cls=_Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elche")
def main() -> None:
    """Train one PyTorch model on mismatched hardware, at the sum of its speeds."""


@main.command()
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="File or directory to learn; default: the standard library's sources.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("elche-demo"),
    show_default=True,
    help="Directory for the table and the trace.",
)
@click.option(
    "--seconds",
    type=float,
    default=20.0,
    show_default=True,
    help="Training time of both devices together; the demo takes about ten times it.",
)
def demo(text: Path | None, out: Path, seconds: float) -> None:
    """Train a small GPT on two unequal devices: alone, with PyTorch, with elche."""
    from elche.demo.demo import DemoConfig, run_demo

    with _as_command():
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
    "--policy", type=click.Choice(POLICIES), help="Instead of the file's policy."
)
@click.option(
    "--story",
    "stories",
    multiple=True,
    metavar="WHAT",
    help="Print after the run what was said and decided: all, rank:1, or lease:12 (who"
    " was given the 13th batch of the last epoch, lease:0/12 of epoch 0). The last"
    " 50000 messages and decisions of the run are remembered. May be repeated.",
)
def simulate(cluster: Path, **settings: Any) -> None:
    """Simulate the run that the TOML file CLUSTER describes."""
    from elche.cli.sim_command import run_simulate

    with _as_command():
        code = run_simulate(cluster, **settings)
    sys.exit(code)


@main.command()
@rank_options
@click.option(
    "--parameters",
    type=click.IntRange(1000, 1_000_000_000),
    default=2_400_000,
    show_default=True,
    help="Of the test network, a chain of equal linear layers.",
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
    """Measure devices and links, predict policies, and say what looks wrong."""
    from elche.cli.doctor_command import run_doctor
    from elche.runtime.process.launch import LaunchConfig

    with _as_command():
        ranks = LaunchConfig(
            command=(), num_ranks=nproc, devices=devices, speeds=speeds
        )
        code = run_doctor(ranks, **settings)
    sys.exit(code)


@main.command(
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", nargs=-1)
def bench(words: tuple[str, ...]) -> None:
    """Refers to the benchmarks of elche's repository."""
    name = words[0] if words and words[0] in ("chaos", "pipeline") else "hetero"
    if any(word.startswith(("--link-", "--codec")) for word in words):
        name = "links"
    raise click.UsageError(
        "elche bench is no part of the installed package; run `python -m "
        f"benchmarks.{name}` in a clone of elche's repository"
    )


main.add_command(plan_command)
main.add_command(run_command)
main.add_command(schedule_command)

if __name__ == "__main__":
    main()
