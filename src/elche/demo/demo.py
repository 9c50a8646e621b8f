"""``elche demo``: one model on two unequal devices, alone, with PyTorch, with elche."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch

from elche.demo.compare import (
    MOST_DISTURBED,
    ContenderRun,
    Devices,
    run_contender,
    whole_batches,
)
from elche.demo.contender import ContenderSpec
from elche.demo.outcome import SOLO, DemoOutcome, draw
from elche.demo.workload import BATCH_SIZE, GPT_MODEL, language_workload
from elche.devices import choice
from elche.errors import ConfigError
from elche.monitor.progress import TaskProgress
from elche.monitor.results import print_table, to_json_text

logger = logging.getLogger(__name__)

SEGMENTS = 8
SPEEDS = (1.0, 0.25)
START_S = 8.0  # overhead of a run: start of processes, evaluations, end
# Solo devices: the slower one stops after this multiple of the faster one's time.
ALONE_TIMES = 1.5
# Disturbed runs are repeated within this multiple of the demo's estimated time.
MOST_TIMES = 2.0
# Real devices: duration of the speed probe, and time limit of the slower device.
PROBE_S = 4.0
SLOWEST_S = 90.0
PROBE_SAMPLES = 32_000
TRACE = "trace.json"
PICTURE = "loss.png"

_Step: TypeAlias = tuple[str, float, ContenderSpec]
"""Name of a run, its expected seconds of training, its specification."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo.

    Attributes:
        out: directory for table, trace and picture; created if absent.
        text: file or directory to learn; None for the standard library's sources.
        seconds: training time of both devices together, at their summed speed.
    """

    out: Path
    text: Path | None = None
    seconds: float = 14.0


def choose_devices() -> Devices:
    """Chooses two unequal accelerators, or one and the CPU, or two emulated devices."""
    here = choice.device_names()
    products = [choice.product_name(torch.device(name)) for name in here]
    for name, product in zip(here, products, strict=True):
        if product != products[0]:
            return Devices(names=(here[0], name))
    if len(here) == 1:
        return Devices(names=(here[0], "cpu"))
    return Devices(speeds=SPEEDS)


def prepare(config: DemoConfig, devices: Devices) -> tuple[Sequence[float], int, str]:
    """Returns each device's samples per second, samples per contender, text source.

    Raises:
        ConfigError: the text is unusable, or the directory cannot be created.
    """
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {config.out}: {error}") from error
    if devices.emulated:
        rates: Sequence[float] = devices.nominal_samples_per_s(BATCH_SIZE)
        total = config.seconds * sum(rates)
    else:
        _source(config, PROBE_SAMPLES)
        spec = _spec(config, PROBE_SAMPLES, kind="solo", max_seconds=PROBE_S)
        probe = run_contender("probe", spec, devices)
        rates = [probe.rate(rank) for rank in range(devices.count)]
        total = min(config.seconds * sum(rates), SLOWEST_S * min(rates))
    samples = whole_batches(total, SEGMENTS)
    return rates, samples, _source(config, samples)


def _source(config: DemoConfig, samples: int) -> str:
    """Description of the text's source; checks that the text has enough windows."""
    return language_workload("gpt", GPT_MODEL, 0, samples, config.text).source


def run_demo(config: DemoConfig) -> None:
    """Runs the command: trains, prints table and explanation, and writes files.

    Raises:
        ConfigError: a setting is wrong; nothing was trained.
        RemoteRankError: a contender failed.
    """
    devices = choose_devices()
    rates, samples, source = prepare(config, devices)
    logger.info("learning %s, %d samples per contender", source, samples)
    with TaskProgress() as progress:
        runs = run_contenders(config, devices, rates, samples, progress)
    outcome = DemoOutcome(devices, runs)
    facts = {"samples": samples, "text": source}
    path = config.out / "table.json"
    path.write_text(to_json_text(outcome.figures(facts)))
    if outcome.warning:
        click.echo(f"{outcome.warning}\n")
    print_table(outcome.table, f"{outcome.title}, {samples} samples each")
    for sentence in outcome.sentences:
        click.echo(f"\n{sentence}")
    picture = config.out / PICTURE
    try:
        draw(outcome, picture)
    except ImportError:
        picture = Path("no picture: pip install 'elche[demo]'")
    click.echo(f"\nWritten: {path}, {config.out / TRACE}, {picture}")
    click.echo(f"\n{outcome.emulated}")
    if outcome.warning:
        click.echo("\nThese figures say little. Run it again on a quiet machine.")


def _spec(config: DemoConfig, samples: int, **settings: Any) -> ContenderSpec:
    return ContenderSpec(
        samples=samples,
        segments=SEGMENTS,
        text=str(config.text) if config.text is not None else None,
        **settings,
    )


def run_contenders(
    config: DemoConfig,
    devices: Devices,
    rates: Sequence[float],
    samples: int,
    progress: TaskProgress,
) -> dict[str, ContenderRun]:
    """Runs all contenders, then repeats disturbed runs while time is left.

    The solo devices train at the same time, each a model of its own.
    """
    alone_s, ddp_s = ALONE_TIMES * samples / max(rates), samples / min(rates) / 2
    spec, both_s = partial(_spec, config, samples), samples / sum(rates)
    steps: list[_Step] = [
        (SOLO, alone_s, spec(kind="solo", max_seconds=alone_s)),
        ("ddp", ddp_s, spec(kind="ddp")),
        ("elche-sync", both_s, spec(kind="elche", policy="sync")),
        ("elche-auto", both_s, spec(kind="elche", policy="auto")),
        ("elche-cadence", both_s, spec(kind="elche", policy="cadence")),
    ]
    most_s = MOST_TIMES * sum(START_S + train_s for _, train_s, _ in steps)
    runs: dict[str, ContenderRun] = {}
    took_s: dict[str, float] = {}
    progress.start("demo", 1.0)
    began_s = time.monotonic()
    for index, (name, seconds, each) in enumerate(steps):
        run_began_s = time.monotonic()
        if name in runs and run_began_s - began_s + took_s[name] > most_s:
            continue  # no time left for another try
        show = partial(_show, progress, steps, index, began_s)
        trace = config.out / TRACE if name == "elche-cadence" else None
        run = run_contender(name, each, devices, show, trace)
        if name not in runs and run.disturbance > MOST_DISTURBED:
            steps.append((name, seconds, each))
        runs[name], took_s[name] = run, time.monotonic() - run_began_s
    progress.finish("demo")
    return runs


def _show(
    progress: TaskProgress,
    steps: Sequence[_Step],
    index: int,
    began_s: float,
    rank: int,
    done: float,
) -> None:
    """Shows one line with rank 0's progress and the time left at the pace so far."""
    if rank == 0:
        name, _, spec = steps[index]
        expected_s = [START_S + train_s for _, train_s, _ in steps]
        share = done / spec.samples
        done_s = sum(expected_s[:index]) + max(START_S, share * expected_s[index])
        left_s = (sum(expected_s) - done_s) * (time.monotonic() - began_s) / done_s
        left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{round(left_s, -1):.0f} s"
        text = f"{index + 1} of {len(steps)}, about {left} left ({name})"
        progress.update("demo", done_s / sum(expected_s), text)
