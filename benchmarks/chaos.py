"""Ranks killed at random for a while: `python -m benchmarks.chaos`.

A run of emulated ranks trains under a policy of windows while ranks other than the
first are killed, on average one every ``--mtbf`` seconds. Every position is accounted
for three times: by what loops were handed, by a counter in the model, and by elche.

A dead rank does not come back yet: where one rank is left, the next run begins. When
ranks can join, `Killer` is the place to start one again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.chaos_rank import SAMPLES
from elche.errors import ConfigError
from elche.runtime.process.launch import LaunchConfig, launch, python_command

RANK = "benchmarks.chaos_rank"
MS_PER_SAMPLE = 1.25
UNDISTURBED = 0.15
"""Part of the time in which nobody is killed, for comparison."""


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """What is tried, and for how long.

    Attributes:
        minutes: all runs together, without their start.
        ranks: of a run at its start.
        mtbf_s: mean time between two kills.
        policy: ``"cadence"`` or ``"async"``.
        seed: of kills and data.
    """

    minutes: float = 1.0
    ranks: int = 4
    mtbf_s: float = 20.0
    policy: str = "async"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "mtbf_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"expected {name} above 0, got {value!r}")
        if self.ranks < 2:
            raise ConfigError(f"expected 2 ranks or more, got {self.ranks}")


@dataclass(kw_only=True)
class RunAccount:
    """One run, as its survivors and its logs tell it.

    Attributes:
        epochs: that were trained whole.
        counted: how often the model counted its least and its most frequent position.
        samples: that the model counted.
        progress: that elche counted.
        missing: positions of whole epochs that no loop was handed.
        checksums: of the survivors' models.
        kills: ranks that were killed.
        seconds: from the first batch to the end.
        rank_s: the same of all ranks, while they lived.
        loss: of the final model.
        failure: why the run was lost; "" if it was not.
    """

    epochs: int = 0
    counted: tuple[int, int] = (0, 0)
    samples: int = 0
    progress: float = 0.0
    missing: int = 0
    checksums: list[str] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    seconds: float = 0.0
    rank_s: float = 0.0
    loss: float = math.nan
    failure: str = ""

    def faults(self) -> list[str]:
        """What does not agree, in words."""
        if self.failure:
            return [self.failure]
        found = []
        least, most = self.counted
        if least != self.epochs or most > self.epochs + 1:
            found.append(
                f"positions are {least} to {most} times in the model after "
                f"{self.epochs} epochs"
            )
        if self.samples != self.progress:
            found.append(f"{self.samples} samples in the model, {self.progress} said")
        if self.missing:
            found.append(f"{self.missing} positions were handed to no loop")
        if len(set(self.checksums)) != 1:
            found.append("survivors hold different models")
        return found


@final
class Killer:
    """A thread that kills a living rank other than the first, now and then.

    Args:
        draws: when and whom.
        mtbf_s: mean time between two kills; infinite: never.

    Attributes:
        seconds: of the run, at its end, from its first batch.
        rank_s: the same of all ranks, while they lived.
    """

    def __init__(self, draws: random.Random, mtbf_s: float) -> None:
        self.seconds = self.rank_s = self._end_s = 0.0
        self._draws, self._mtbf_s = draws, mtbf_s
        self._is_over = threading.Event()
        self._pids: dict[int, int] = {}
        self._began_s: dict[int, float] = {}
        self._died_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def kills(self) -> list[int]:
        """Who was killed, in order."""
        return list(self._died_s)

    def begin(self, rank: int, pid: int) -> None:
        """A rank has trained on its first batch."""
        self._began_s[rank] = time.monotonic()
        self._pids[rank] = pid

    def stop(self) -> None:
        """Ranks begin to leave: none is killed any more."""
        if not self._is_over.is_set():
            self._end_s = time.monotonic()
            self._is_over.set()

    def end(self) -> None:
        """The run is over."""
        self.stop()
        self._thread.join()
        end_s, died, began = self._end_s, self._died_s, self._began_s
        self.seconds = end_s - min(began.values(), default=end_s)
        self.rank_s = sum(died.get(rank, end_s) - began[rank] for rank in began)

    def _run(self) -> None:
        rate = 1.0 / self._mtbf_s
        while rate and not self._is_over.wait(self._draws.expovariate(rate)):
            living = sorted(set(self._pids) - set(self._died_s) - {0})
            if living:
                rank = self._draws.choice(living)
                os.kill(self._pids[rank], signal.SIGKILL)
                self._died_s[rank] = time.monotonic()


def one_run(
    config: ChaosConfig, draws: random.Random, seconds: float, mtbf_s: float
) -> RunAccount:
    """Trains until the time is over, or one rank is left."""
    killer, said = Killer(draws, mtbf_s), dict[int, dict[str, Any]]()

    def on_line(rank: int, line: str) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            sys.stderr.write(line + "\n")
            return
        if "pid" in values:
            killer.begin(rank, values["pid"])
        else:
            killer.stop()
            said[rank] = values

    with tempfile.TemporaryDirectory(prefix="elche-chaos-") as folder:
        spec = {
            "policy": config.policy,
            "seed": config.seed,
            "folder": folder,
            "seconds": seconds,
        }
        result = launch(
            LaunchConfig(
                command=python_command("-m", RANK, json.dumps(spec)),
                speeds=(1.0,) * config.ranks,
                ms_per_sample=MS_PER_SAMPLE,
                environment={"OMP_NUM_THREADS": "1"},
                on_line=on_line,
            )
        )
        killer.end()
        account = RunAccount(
            rank_s=killer.rank_s, seconds=killer.seconds, kills=killer.kills
        )
        silent = sorted({*range(config.ranks)} - {*said} - {*account.kills})
        if result.exit_code or silent:
            reason = result.reason or f"ranks {silent} said nothing"
            account.failure = f"the run was lost, code {result.exit_code}: {reason}"
            return account
        first = said[0]
        account.epochs, account.loss = first["epochs"], first["loss"]
        account.counted = tuple(first["counted"])
        account.samples, account.progress = first["samples"], first["progress"]
        account.checksums = [each["checksum"] for each in said.values()]
        account.missing = missing(logs_in(Path(folder)), account.epochs)
    return account


def logs_in(folder: Path) -> Iterable[str]:
    """Lines of all ranks' logs: an epoch, and indices that were handed out in it."""
    for path in folder.glob("log*.txt"):
        whole, _, _ = path.read_text().rpartition("\n")  # the last one may be cut off
        yield from whole.splitlines()


def missing(lines: Iterable[str], epochs: int) -> int:
    """How many positions of these epochs no loop was handed."""
    handed: set[tuple[int, int]] = set()
    for line in lines:
        epoch, *indices = map(int, line.split())
        if epoch < epochs:
            handed.update((epoch, index) for index in indices)
    return epochs * SAMPLES - len(handed)


def measure(config: ChaosConfig) -> dict[str, Any]:
    """Runs until the time is over; the accounts of all runs."""
    draws = random.Random(config.seed)
    left_s = 60.0 * config.minutes
    calm = one_run(config, draws, UNDISTURBED * left_s, math.inf)
    left_s -= UNDISTURBED * left_s
    runs: list[RunAccount] = []
    while left_s > 0.0:
        runs.append(one_run(config, draws, left_s, config.mtbf_s))
        left_s -= max(1.0, runs[-1].seconds)
    rank_s = sum(run.rank_s for run in runs)
    rate = sum(run.progress for run in runs) / max(rank_s, 1e-9)
    calm_rate = calm.progress / max(calm.rank_s, 1e-9)
    return {
        "config": asdict(config),
        "emulated": True,
        "undisturbed": asdict(calm) | {"faults": calm.faults()},
        "runs": [asdict(run) | {"faults": run.faults()} for run in runs],
        "kills": sum(len(run.kills) for run in runs),
        "samples": sum(run.progress for run in runs),
        "faults": [fault for run in (calm, *runs) for fault in run.faults()],
        "samples_per_rank_s": rate,
        "undisturbed_samples_per_rank_s": calm_rate,
        "goodput": rate / calm_rate if calm_rate else math.nan,
    }


def table(found: dict[str, Any]) -> str:
    """What was measured, as text."""
    lines = [
        f"{'run':>4} {'kills':>8} {'epochs':>7} {'samples':>9} {'loss':>8}  accounts"
    ]
    for name, run in [("calm", found["undisturbed"]), *enumerate(found["runs"])]:
        kills = ",".join(map(str, run["kills"])) or "-"
        agrees = "; ".join(run["faults"]) or "agree"
        lines.append(
            f"{name:>4} {kills:>8} {run['epochs']:>7} {run['progress']:>9.0f} "
            f"{run['loss']:>8.4f}  {agrees}"
        )
    lines.append(
        f"{found['kills']} kills; {found['samples_per_rank_s']:.0f} samples/s of a "
        f"living emulated rank, {found['undisturbed_samples_per_rank_s']:.0f} "
        f"undisturbed: {found['goodput']:.3f}; dead ranks do not come back"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mtbf", type=float, default=20.0, help="seconds")
    parser.add_argument("--policy", choices=("cadence", "async"), default="async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = measure(
        ChaosConfig(
            minutes=asked.minutes,
            ranks=asked.ranks,
            mtbf_s=asked.mtbf,
            policy=asked.policy,
            seed=asked.seed,
        )
    )
    print(table(found))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
