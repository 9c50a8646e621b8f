"""Runs of several contenders on the same devices, and their results."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elche.config_checks import check_not_negative, check_positive
from elche.demo.contender import ContenderSpec
from elche.demo.workload import BATCH_SIZE
from elche.errors import ConfigError, RemoteRankError
from elche.runtime.process.launch import launch
from elche.runtime.process.launch_config import (
    LaunchConfig,
    LaunchResult,
    Network,
    python_command,
)

MS_PER_SAMPLE = 1.25
STDERR_TAIL_LINES = 25
MOST_DISTURBED = 0.05
"""Largest disturbance (fraction of training time) of a run that allows a verdict."""

OnProgress = Callable[[int, float], None]
"""Callback for a rank and the number of samples so far, of this rank or of the run."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of a comparison: emulated by `speeds`, or real by `names`.

    Attributes:
        ms_per_sample: time per sample of an emulated device with speed 1.
        fixed_ms: fixed time per batch of an emulated device.
        network: emulated network between them; None for this host's loopback.

    Raises:
        ConfigError: both or neither kind is set, or a time is not positive.
    """

    speeds: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    ms_per_sample: float = MS_PER_SAMPLE
    fixed_ms: float = 0.0
    network: Network | None = None

    def __post_init__(self) -> None:
        if bool(self.speeds) == bool(self.names):
            raise ConfigError("expected either speeds of emulated devices, or devices")
        check_positive("--ms-per-sample", self.ms_per_sample)
        check_not_negative("--fixed-ms", self.fixed_ms)

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.speeds or self.names)

    @property
    def emulated(self) -> bool:
        """True if the devices are emulated."""
        return bool(self.speeds)

    def nominal_samples_per_s(self, batch_size: int) -> tuple[float, ...]:
        """Nominal samples per second of each emulated device at a batch size."""
        fixed_ms = self.fixed_ms / batch_size
        return tuple(
            1e3 / (fixed_ms + self.ms_per_sample / speed) for speed in self.speeds
        )

    def only(self, index: int) -> Devices:
        """Selects one device by index."""
        one = slice(index, index + 1)
        return replace(self, speeds=self.speeds[one], names=self.names[one])


@dataclass(frozen=True)
class ContenderRun:
    """Results of one contender, as written by each rank; see `Contender`."""

    name: str
    ranks: tuple[dict[str, Any], ...]

    def rate(self, rank: int = 0) -> float:
        """Samples per second of the run, or of a rank that trains alone."""
        result = self.ranks[rank]
        return float(result["samples"] / result["train_s"])

    def curve(self, rank: int = 0) -> list[tuple[float, float, float]]:
        """Evaluations as (seconds, samples, loss)."""
        return [(at, samples, loss) for at, samples, loss in self.ranks[rank]["curve"]]

    @property
    def devices(self) -> tuple[str, ...]:
        """Device names by rank."""
        return tuple(str(result["device"]) for result in self.ranks)

    @property
    def disturbance(self) -> float:
        """Overrun or wait for a core, as a fraction of training; the worst rank's."""
        lost = (max(r["overrun_s"], r["starved_s"]) / r["train_s"] for r in self.ranks)
        return float(max(lost))


def run_contender(
    name: str,
    spec: ContenderSpec,
    devices: Devices,
    on_progress: OnProgress = lambda rank, done: None,
    trace_path: Path | None = None,
    module: str = "elche.demo.contender",
) -> ContenderRun:
    """Trains one contender, a process per device, and returns its results.

    Every rank runs `module`. A temporary directory replaces the ``out`` of `spec`. The
    timeline of elche's ranks is written to `trace_path`.

    Raises:
        RemoteRankError: a rank failed; the message has the end of its output.
        KeyboardInterrupt: the user interrupted the run; all ranks have ended.
    """

    def on_line(rank: int, line: str) -> None:
        done = _done(line)
        if done is None:
            sys.stderr.write(line + "\n")
        else:
            on_progress(rank, done)

    with tempfile.TemporaryDirectory(prefix="elche-") as folder:
        out = Path(folder)
        (out / "spec.json").write_text(json.dumps(asdict(replace(spec, out=folder))))
        result = launch(
            LaunchConfig(
                command=python_command("-m", module, str(out / "spec.json")),
                devices=devices.names or None,
                speeds=devices.speeds or None,
                ms_per_sample=devices.ms_per_sample,
                fixed_ms=devices.fixed_ms,
                environment={"OMP_NUM_THREADS": "1"} if devices.emulated else {},
                on_line=on_line,
                network=devices.network,
                trace_path=trace_path,
            )
        )
        _check(name, result, out)
        files = [out / f"result-{rank}.json" for rank in range(devices.count)]
        return ContenderRun(name, tuple(json.loads(f.read_text()) for f in files))


def whole_batches(
    samples: float, segments: int = 1, batch_size: int = BATCH_SIZE
) -> int:
    """Nearest number of samples that divides into equal segments of whole batches."""
    unit = batch_size * segments
    return max(1, round(samples / unit)) * unit


def machine() -> dict[str, Any]:
    """Describes the machine on which the figures were measured."""
    return {
        "cores": os.cpu_count() or 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _done(line: str) -> float | None:
    """Number of samples in a contender's progress line; None for any other line."""
    try:
        return float(json.loads(line)["done"])
    except (ValueError, TypeError, KeyError):
        return None


def _check(name: str, result: LaunchResult, out: Path) -> None:
    if not result.exit_code:
        return
    interrupted = 128 + signal.SIGINT
    if result.signal or interrupted in result.exit_codes:
        raise KeyboardInterrupt
    ended = [rank for rank, code in enumerate(result.exit_codes) if code]
    failed = [rank for rank in ended if rank not in result.terminated] or ended
    codes = [result.exit_codes[rank] for rank in failed]
    lines = [f"the contender {name} failed: ranks {failed} ended with codes {codes}"]
    if result.reason:
        lines[0] += f": {result.reason.splitlines()[0]}"
    for rank in failed:
        path = out / f"stderr-{rank}.txt"
        output = path.read_text(errors="replace").splitlines() if path.exists() else []
        lines.append(f"--- last output of rank {rank} ---")
        lines += output[-STDERR_TAIL_LINES:] or ["(nothing)"]
    raise RemoteRankError("\n".join(lines), result.failed_first)
