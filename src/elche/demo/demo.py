"""``elche demo``: one model on two unequal devices, alone, with PyTorch, with elche."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from elche.config_checks import check_positive
from elche.demo.compare import ContenderRun, Devices, run_contender, whole_batches
from elche.demo.contender import ContenderSpec
from elche.demo.outcome import DemoOutcome
from elche.demo.workload import BATCH_SIZE, GPT_MODEL, language_workload
from elche.devices import choice
from elche.errors import ConfigError
from elche.monitor.progress import TaskProgress
from elche.monitor.results import print_table, to_json_text

logger = logging.getLogger(__name__)

SEGMENTS = 8
SPEEDS = (1.0, 0.25)
# Real devices: duration of the speed probe, and time limit of the slower device.
PROBE_S = 4.0
SLOWEST_S = 90.0
PROBE_SAMPLES = 32_000
TRACE = "trace.json"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo.

    Attributes:
        out: directory for table and trace; created if absent.
        text: file or directory to learn; None for the standard library's sources.
        seconds: training time of both devices together, at their summed speed.

    Raises:
        ConfigError: the seconds are not positive.
    """

    out: Path
    text: Path | None = None
    seconds: float = 20.0

    def __post_init__(self) -> None:
        check_positive("--seconds", self.seconds)


def choose_devices() -> Devices:
    """Chooses two unequal accelerators, one and the CPU, or two emulated devices."""
    here = choice.device_names()
    products = [choice.product_name(torch.device(name)) for name in here]
    for name, product in zip(here, products, strict=True):
        if product != products[0]:
            return Devices(names=(here[0], name))
    if len(here) == 1:
        return Devices(names=(here[0], "cpu"))
    return Devices(speeds=SPEEDS)


def prepare(config: DemoConfig, devices: Devices) -> tuple[int, str]:
    """Checks text and directory, and computes the number of samples.

    Returns:
        Samples per contender, and the source of the text.

    Raises:
        ConfigError: the text is unusable, or the directory cannot be created.
    """
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {config.out}: {error}") from error
    if devices.emulated:
        total = config.seconds * sum(devices.nominal_samples_per_s(BATCH_SIZE))
    else:
        _source(config, PROBE_SAMPLES)
        spec = _spec(config, PROBE_SAMPLES, kind="solo", max_seconds=PROBE_S)
        probe = run_contender("probe", spec, devices)
        rates = [probe.rate(rank) for rank in range(devices.count)]
        total = min(config.seconds * sum(rates), SLOWEST_S * min(rates))
    samples = whole_batches(total, SEGMENTS)
    return samples, _source(config, samples)


def _source(config: DemoConfig, samples: int) -> str:
    """Source of the text; checks that it has this many windows."""
    return language_workload("gpt", GPT_MODEL, 0, samples, config.text).source


def run_demo(config: DemoConfig) -> None:
    """Runs the command: trains, prints table and explanation, and writes files.

    Raises:
        ConfigError: a setting is wrong; nothing was trained.
        RemoteRankError: a contender failed.
    """
    devices = choose_devices()
    samples, source = prepare(config, devices)
    logger.info("learning %s, %d samples per contender", source, samples)
    with TaskProgress() as progress:
        runs = run_contenders(config, devices, samples, progress)
    outcome = DemoOutcome(devices, runs)
    facts = {"samples": samples, "text": source}
    path = config.out / "table.json"
    path.write_text(to_json_text(outcome.figures(facts)))
    print_table(outcome.table, f"{outcome.title}, {samples} samples each")
    for sentence in outcome.sentences:
        click.echo(f"\n{sentence}")
    click.echo(f"\nWritten: {path}, {config.out / TRACE}")
    click.echo(f"\n{outcome.emulated}")


def _spec(config: DemoConfig, samples: int, **settings: Any) -> ContenderSpec:
    return ContenderSpec(
        samples=samples,
        segments=SEGMENTS,
        text=str(config.text) if config.text is not None else None,
        **settings,
    )


def run_contenders(
    config: DemoConfig, devices: Devices, samples: int, progress: TaskProgress
) -> dict[str, ContenderRun]:
    """Runs all contenders; the solo devices run at the same time, each on its own."""
    alone = [f"alone on device {index}" for index in range(devices.count)]
    plan: dict[str, tuple[list[str], dict[str, Any]]] = {
        "solo": (alone, {"kind": "solo"}),
        "ddp": (["PyTorch's DDP"], {"kind": "ddp"}),
        **{
            f"elche-{policy}": (
                [f"elche {policy}"],
                {"kind": "elche", "policy": policy},
            )
            for policy in ("sync", "auto", "cadence")
        },
    }
    runs = {}
    for name, (tasks, settings) in plan.items():
        for task in tasks:
            progress.start(task, samples)
        runs[name] = run_contender(
            name,
            _spec(config, samples, **settings),
            devices,
            partial(_show, progress, tasks),
            config.out / TRACE if name == "elche-cadence" else None,
        )
        for rank, task in enumerate(tasks):
            progress.update(task, samples)
            progress.finish(task, f"{runs[name].rate(rank):.0f} samples/s")
    return runs


def _show(progress: TaskProgress, tasks: Sequence[str], rank: int, done: float) -> None:
    if rank < len(tasks):
        progress.update(tasks[rank], done)
