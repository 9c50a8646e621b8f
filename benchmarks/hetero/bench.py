"""A comparison of ways to train on unequal devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.hetero.bounds import ContenderBounds
from benchmarks.hetero.contender import MODULE, BenchSpec
from benchmarks.hetero.verdict import CONTROL, BenchVerdict, rate_of
from benchmarks.hetero.workloads import OPTIMIZERS, WORKLOADS, batch_size_of
from elche.config import POLICIES
from elche.demo.compare import (
    MS_PER_SAMPLE,
    ContenderRun,
    Devices,
    machine,
    run_contender,
    whole_batches,
)
from elche.demo.workload import split_edges
from elche.errors import ConfigError
from elche.monitor.progress import TaskProgress
from elche.monitor.results import (
    check_writable,
    contenders_to_json,
    print_table,
    to_json_text,
)
from elche.runtime.process.launch_config import Network

DEFAULT_SECONDS = 40.0
REJECTED_CODE = 3
MOST_TIMES = 1.5
"""elche's ranks leave a run of capped time after so many times its length."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured, and how long.

    Attributes:
        speeds: relative speeds of the emulated devices, two or more.
        model: a workload's name.
        optimizer: every contender's, one of `OPTIMIZERS`.
        seconds: every contender trains as many samples as all devices together
            deliver in this time; runs alone that only measure speed end after it.
        seeds: repetitions, each with parameters, data and order of its own.
        ms_per_sample: time of one sample on a device of speed 1.
        fixed_ms: time of a batch beside its samples', on every device.
        batch_size: samples of a batch, of all ranks together; None: the model's.
        contenders: the only ones to run; empty for all.
        time_capped: no rank trains longer than about `seconds`, and losses are not
            compared.
        solo_seconds: runs alone that only measure speed end after this instead.
        allow_noise: do not reject a run whose control is below `MIN_CONTROL`.

    Raises:
        ConfigError: a setting is wrong; says what to write instead.
    """

    speeds: tuple[float, ...]
    model: str = "mlp"
    optimizer: str = "adamw"
    seconds: float = DEFAULT_SECONDS
    seeds: int = 1
    ms_per_sample: float = MS_PER_SAMPLE
    fixed_ms: float = 0.0
    batch_size: int | None = None
    contenders: tuple[str, ...] = ()
    time_capped: bool = False
    solo_seconds: float | None = None
    allow_noise: bool = False

    def __post_init__(self) -> None:
        devices = self.devices
        if self.model not in WORKLOADS:
            raise ConfigError(
                f"unknown model {self.model!r}; choose one of {', '.join(WORKLOADS)}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer {self.optimizer!r}; choose one of"
                f" {', '.join(OPTIMIZERS)}"
            )
        if not 2 <= devices.count <= self.samples_per_batch:
            raise ConfigError(
                f"expected 2 to {self.samples_per_batch} --speeds, such as 1,0.25; got"
                f" {devices.count}"
            )
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"expected positive --seconds, got {self.seconds!r}")
        solo = self.solo_seconds
        if solo is not None and not (math.isfinite(solo) and solo > 0):
            raise ConfigError(f"expected positive --solo-seconds, got {solo!r}")
        if self.seeds < 1:
            raise ConfigError(f"expected --seeds of at least 1, got {self.seeds}")
        unknown = sorted(set(self.contenders) - {*self.all_names})
        if unknown:
            raise ConfigError(
                f"unknown contender {unknown[0]!r}; choose among"
                f" {', '.join(self.all_names)}"
            )
        edges = split_edges(self.samples_per_batch, self.speeds)
        if "ddp-split" in self.names and len(set(edges)) < len(edges):
            raise ConfigError(
                f"a batch of {self.samples_per_batch} split by the speeds {self.speeds}"
                " leaves a device without a sample; leave ddp-split out with"
                " --contenders"
            )

    @property
    def samples_per_batch(self) -> int:
        """Samples of a batch, of all ranks together."""
        return self.batch_size or batch_size_of(self.model)

    @property
    def devices(self) -> Devices:
        """The emulated devices."""
        return Devices(
            speeds=self.speeds,
            ms_per_sample=self.ms_per_sample,
            fixed_ms=self.fixed_ms,
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """Declared samples per second of each device."""
        return self.devices.nominal_samples_per_s(self.samples_per_batch)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Contenders that these settings know, in order."""
        alone = [f"solo-{index}" for index in range(len(self.speeds))]
        ours = [f"elche-{policy}" for policy in POLICIES]
        return (*alone, CONTROL, "ddp", "ddp-split", *ours)

    @property
    def names(self) -> tuple[str, ...]:
        """Contenders that are run, in order."""
        wanted = self.contenders or self.all_names
        return tuple(name for name in self.all_names if name in wanted)

    @property
    def samples(self) -> int:
        """Samples that a contender trains on."""
        return self.whole_batches(self.seconds * sum(self.rates))

    def whole_batches(self, samples: float) -> int:
        """So many samples, in whole batches; at least one."""
        return whole_batches(samples, batch_size=self.samples_per_batch)

    def spec(self, name: str, seed: int) -> BenchSpec:
        """What a contender trains."""
        samples, settings = self.samples, dict[str, Any]()
        if name == CONTROL or name.startswith("solo-"):
            settings["kind"] = "solo"
            if self.time_capped or name != "solo-0":
                settings["max_seconds"] = self.solo_seconds or self.seconds
        elif name.startswith("elche-"):
            settings |= {"kind": "elche", "policy": name.removeprefix("elche-")}
            if self.time_capped:
                settings["max_seconds"] = MOST_TIMES * self.seconds
        else:
            shares = self.speeds if name == "ddp-split" else ()
            settings |= {"kind": name, "shares": shares}
        if self.time_capped and name == "ddp":
            equal = min(self.rates) * self.devices.count
            samples = self.whole_batches(self.seconds * equal)
        return BenchSpec(
            model=self.model,
            samples=samples,
            out="",
            batch_size=self.samples_per_batch,
            optimizer=self.optimizer,
            seed=seed,
            **settings,
        )

    def run_on(self, name: str, network: Network | None = None) -> Devices:
        """What a contender runs on: one device for those alone, else all."""
        if name.startswith("solo-"):
            return self.devices.only(int(name.removeprefix("solo-")))
        return replace(self.devices, network=network)

    def reduction_s(self, name: str) -> float:
        """Least time of a sum of all gradients on the link; 0 on loopback."""
        return 0.0

    def bound(self, name: str, alone: Sequence[float]) -> float | None:
        """Best possible hardware efficiency of a contender's kind.

        Args:
            name: of the contender.
            alone: measured samples per second of each device alone.
        """
        bounds = ContenderBounds(
            batch_size=self.samples_per_batch,
            speeds=self.speeds,
            sample_s=self.ms_per_sample / 1e3,
            alone=alone,
            reduction_s=self.reduction_s(name),
        )
        return bounds.efficiency(name)

    @property
    def title(self) -> str:
        """What is measured, in words."""
        speeds = ", ".join(f"{speed:g}" for speed in self.speeds)
        seeds = f", {self.seeds} seeds" if self.seeds > 1 else ""
        fixed = f" and {self.fixed_ms:g} ms per batch" if self.fixed_ms else ""
        return (
            f"{self.model} with {self.optimizer} on emulated devices of speeds {speeds}"
            f" ({self.ms_per_sample:g} ms per sample at speed 1{fixed}),"
            f" batches of {self.samples_per_batch},"
            f" {self.samples} samples{seeds}"
        )


def run_bench(
    config: BenchConfig, json_path: str | None, network: Network | None = None
) -> int:
    """The command: measures, prints the table, writes the JSON.

    Args:
        config: what to measure.
        json_path: file to write; None for none.
        network: where the ranks meet, if not on this host's loopback.

    Returns:
        The exit code: 0, or `REJECTED_CODE` if the control failed.

    Raises:
        ConfigError: the file cannot be written; nothing was measured.
        RemoteRankError: a contender failed.
    """
    if json_path is not None:
        check_writable(Path(json_path))
    with TaskProgress() as progress:
        runs = _run_all(config, progress, network)
    verdict = BenchVerdict(
        runs,
        config.devices.count,
        config.time_capped,
        config.allow_noise,
        config.bound,
    )
    print_table(verdict.table, config.title)
    print("\n" + "\n".join(verdict.remarks))
    if json_path is not None:
        Path(json_path).write_text(to_json_text(_values(config, verdict, runs)))
        print(f"\nWritten: {json_path}")
    return REJECTED_CODE if verdict.rejected else 0


def _run_all(
    config: BenchConfig, progress: TaskProgress, network: Network | None
) -> dict[str, list[ContenderRun]]:
    """For every seed all contenders in turn; each seed begins with another one."""
    runs: dict[str, list[ContenderRun]] = {name: [] for name in config.names}
    for seed in range(config.seeds):
        first = seed % len(config.names)
        for name in config.names[first:] + config.names[:first]:
            task = f"{name}, seed {seed}" if config.seeds > 1 else name
            devices = config.run_on(name, network)
            runs[name].append(_run_one(config, name, seed, task, devices, progress))
    return runs


def _run_one(
    config: BenchConfig,
    name: str,
    seed: int,
    task: str,
    devices: Devices,
    progress: TaskProgress,
) -> ContenderRun:
    spec = config.spec(name, seed)
    total = float(spec.samples)
    rates = devices.nominal_samples_per_s(config.samples_per_batch)
    if spec.max_seconds is not None:
        total = min(total, spec.max_seconds * rates[0])
    progress.start(task, total)

    def on_progress(rank: int, done: float) -> None:
        if rank == 0:
            progress.update(task, min(done, total))

    run = run_contender(name, spec, devices, on_progress, module=MODULE)
    progress.update(task, total)
    progress.finish(task, f"{rate_of(name, run):.0f} samples/s")
    return run


def _values(
    config: BenchConfig, verdict: BenchVerdict, runs: dict[str, list[ContenderRun]]
) -> dict[str, Any]:
    """The table, and everything that ranks have measured, for JSON."""
    return {
        "settings": asdict(config),
        "contenders": contenders_to_json(verdict.table),
        "remarks": verdict.remarks,
        "rejected": verdict.rejected,
        "runs": {name: [run.ranks for run in seeds] for name, seeds in runs.items()},
        "machine": machine(),
    }
