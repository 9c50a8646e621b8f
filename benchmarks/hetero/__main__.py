"""Contenders on emulated devices: PyTorch's ways and elche's policies.

    python -m benchmarks.hetero --speeds 1,0.25 --json bench.json

Every device is a process on this machine's CPU whose real training is stretched by
sleeping. Run it in a clone of the repository, on a quiet machine.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from benchmarks.hetero.bench import BenchConfig, run_bench
from elche.cli.run_command import names, numbers
from elche.errors import ConfigError
from elche.monitor.results import log_to_stderr


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--speeds",
    required=True,
    callback=numbers,
    help="Relative speeds of the emulated devices, such as 1,0.25.",
)
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    help="mlp, cnn, gpt, gpt-small or gpt-10m.",
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
@click.option("--json", "json_path", help="File for the figures.")
def hetero(
    json_path: str | None, contenders: tuple[str, ...] | None, **settings: Any
) -> None:
    """Compare PyTorch and elche on unequal emulated devices."""
    try:
        with log_to_stderr():
            config = BenchConfig(contenders=contenders or (), **settings)
            code = run_bench(config, json_path)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    hetero()
