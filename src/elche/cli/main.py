"""The command line: run, join, witness, demo, bench, doctor, simulate and more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from elche import __version__
from elche.cli.host_options import host_options, read_hosts
from elche.cli.join_command import join as join_command
from elche.cli.plan_command import plan as plan_command
from elche.cli.rank_options import (
    checked,
    exit_code,
    follow,
    names,
    numbers,
    rank_options,
)
from elche.cli.restart_options import restart_options
from elche.cli.schedule_command import schedule as schedule_command
from elche.cli.witness_command import witness as witness_command
from elche.config import POLICIES
from elche.errors import ConfigError, ElcheError

if TYPE_CHECKING:
    from elche.runtime.process.rank_output import Display


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


class _Bench(click.Group):
    """Says where to what is for this repository's developers alone."""

    moved: ClassVar = {
        "chaos": "benchmarks.chaos",
        "pipeline": "benchmarks.pipeline",
        "--link-mbit": "benchmarks.links",
        "--link-delay-ms": "benchmarks.links",
        "--codec": "benchmarks.links",
    }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [word for word in args if word.startswith("--")]
        for word in (*args[:1], *options):
            module = self.moved.get(word.partition("=")[0])
            if module is not None:
                raise click.UsageError(
                    f"{word} is no part of the installed package; run `python -m "
                    f"{module}` in a clone of elche's repository"
                )
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def _as_command() -> Iterator[None]:
    """Wrong settings end with code 2; elche's log is shown."""
    from elche.demo.results import log_to_stderr

    with checked(), log_to_stderr():
        yield


@click.group(cls=_Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elche")
def main() -> None:
    """Train one PyTorch model on mismatched hardware, at the sum of its speeds."""


def _display() -> Display | None:
    """Draws a run on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return None
    from elche.monitor.live_run import open_display

    return open_display()


# What follows SCRIPT is its own, options too.
@main.command(context_settings={"allow_interspersed_args": False})
@rank_options
@click.option(
    "--ms-per-sample",
    type=float,
    help="Time per sample of an emulated device of speed 1; default: 1.25.",
)
@click.option(
    "--fixed-ms",
    type=float,
    help="Time per batch of an emulated device beside its samples'; default: 0.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help="Policy where the script names none.",
)
@click.option(
    "--story",
    envvar="ELCHE_STORY",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for what was said and decided (the last 50000 messages and decisions),"
    " written when the run ends, however it ends.",
)
@restart_options
@host_options
@click.option(
    "--rejoin",
    type=int,
    default=0,
    show_default=True,
    help="Start so many ranks at most in place of some that died while the others go"
    " on; each joins them where they stand.",
)
@click.option(
    "--min-ranks",
    type=click.IntRange(min=1),
    help="With --rejoin: while fewer ranks live, those pause until others have joined.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the timeline of all ranks (Chrome trace, which ui.perfetto.dev"
    " opens), written when the run ends, however it ends.",
)
@click.option(
    "--quiet", is_flag=True, help="No progress; it is shown in a terminal only."
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nproc: int | None,
    devices: tuple[str, ...] | None,
    speeds: tuple[float, ...] | None,
    ms_per_sample: float | None,
    fixed_ms: float | None,
    policy: str | None,
    story: Path | None,
    rejoin: int,
    min_ranks: int | None,
    trace: Path | None,
    quiet: bool,
    script: str,
    arguments: tuple[str, ...],
    **more: Any,
) -> None:
    """Run SCRIPT on several devices, one process each."""
    from elche.runtime.process.launch import LaunchConfig, python_command
    from elche.runtime.process.restarts import RestartConfig, launch_with_restarts

    emulated = {"ms_per_sample": ms_per_sample, "fixed_ms": fixed_ms}
    settings: dict[str, Any] = {k: v for k, v in emulated.items() if v is not None}
    with checked():
        if settings and speeds is None:
            raise ConfigError(
                "--ms-per-sample and --fixed-ms are for emulated devices; give their "
                "--speeds, such as 1,0.25"
            )
        for path in (story, trace):
            if path is not None:
                from elche.demo.results import check_writable

                check_writable(path)
        for_one_host = {"--trace": trace, "--max-restarts": more["max_restarts"]}
        hosts = read_hosts(more, (script, *arguments), for_one_host)
        if hosts is not None and hosts.remote is not None:
            if (nproc, devices, speeds) != (None, None, None):
                raise ConfigError("--hosts says how many ranks each host has")
            nproc = hosts.remote.own_ranks
        follows = hosts is not None and hosts.node_rank > 0
        config = LaunchConfig(
            command=python_command(script, *arguments),
            num_ranks=nproc,
            devices=devices,
            speeds=speeds,
            environment={
                **({"ELCHE_POLICY": policy} if policy else {}),
                **({"ELCHE_MIN_RANKS": str(min_ranks)} if min_ranks else {}),
            },
            story_path=story,
            trace_path=trace,
            display=None if quiet or follows else _display(),
            hosts=hosts,
            rejoin=rejoin,
            **settings,
        )
        if follows:
            follow(config, "elche run")
        result = launch_with_restarts(
            config,
            RestartConfig(**more),
            lambda line: click.echo(f"elche run: {line}", err=True),
        )
    failed = [rank for rank, code in enumerate(result.exit_codes) if code]
    if failed:
        reason = result.reason.splitlines()[0] if result.reason else "see its output"
        if result.signal and result.terminated:
            reason += (
                f"; ranks {list(result.terminated)} did not end in time, and were "
                "ended: a last checkpoint may be missing"
            )
        codes = ", ".join(exit_code(result.exit_codes[rank]) for rank in failed)
        click.echo(
            f"elche run: ranks {failed} ended with codes [{codes}]: {reason}", err=True
        )
    elif config.world_size > 1 and not (result.have_met or result.signal):
        click.echo(
            f"elche run: the script ran {config.world_size} times, and no rank met "
            "another: train through elche.setup, elche.Trainer, elche.init_group or "
            "torch.distributed",
            err=True,
        )
    sys.exit(result.exit_code)


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
    help="Directory for the table, the picture and the trace.",
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
@click.option("--json", "json_path", help="File for the figures; - is standard output.")
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
def simulate(**settings: Any) -> None:
    """Simulate the run that the TOML file CLUSTER describes."""
    from elche.cli.sim_command import SimulateConfig, run_simulate

    with _as_command():
        code = run_simulate(SimulateConfig(**settings))
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
@click.option("--json", "json_path", help="File for the figures; - is standard output.")
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


@main.group(cls=_Bench)
def bench() -> None:
    """Measure ways of training against each other."""


@bench.command()
@click.option(
    "--speeds",
    required=True,
    callback=numbers,
    help="Relative speeds of the emulated devices, such as 1,0.25.",
)
@click.option(
    "--policy", type=click.Choice(("all", *POLICIES)), default="all", show_default=True
)
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    help="mlp, cnn, lstm, gpt, gpt-small or gpt-10m.",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help="Every contender's: adamw, sgd (momentum 0.9), or muon beside adamw.",
)
@click.option(
    "--seconds",
    type=float,
    default=40.0,
    show_default=True,
    help="Training time of all devices together, per contender.",
)
@click.option("--seeds", type=int, default=1, show_default=True, help="Repetitions.")
@click.option(
    "--ms-per-sample",
    type=float,
    default=1.25,
    show_default=True,
    help="Time per sample of an emulated device of speed 1.",
)
@click.option(
    "--fixed-ms",
    type=float,
    default=0.0,
    show_default=True,
    help="Time per batch of an emulated device beside its samples', at any speed.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples of a batch, of all ranks together; default: the model's (32, or 8).",
)
@click.option(
    "--contenders", callback=names, help="Run only these, such as solo-0,ddp."
)
@click.option(
    "--time-capped/--samples-equal",
    help="Nobody trains longer than --seconds, losses are not compared; default:"
    " the same samples for all.",
)
@click.option(
    "--solo-seconds",
    type=float,
    help="Runs alone that only measure speed end after this; default: --seconds.",
)
@click.option("--allow-noise", is_flag=True, help="Do not reject a noisy run.")
@click.option("--json", "json_path", help="File for the figures; - is standard output.")
def hetero(
    json_path: str | None, contenders: tuple[str, ...] | None, **settings: Any
) -> None:
    """Compare PyTorch and elche on unequal emulated devices."""
    from elche.demo.bench import BenchConfig, run_bench

    with _as_command():
        config = BenchConfig(contenders=contenders or (), **settings)
        code = run_bench(config, json_path)
    sys.exit(code)


main.add_command(join_command)
main.add_command(plan_command)
main.add_command(schedule_command)
main.add_command(witness_command)

if __name__ == "__main__":
    main()
