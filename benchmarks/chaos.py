"""Ranks, or the coordinator, killed at random: `python -m benchmarks.chaos`.

A run of emulated ranks trains while any of them are killed, on average one every
``--mtbf`` seconds. A newcomer takes the place of each dead one, and may be killed
before it trains. With ``--victims coordinator`` ranks live and their coordinator is
killed; ``both`` kills either. Every position is accounted for three times: by what
loops were handed, by a counter in the model, and by elche.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_killer import RANKS, VICTIMS, Killer, KillPlan
from benchmarks.chaos_rank import OVER, SAMPLES
from elche.errors import ConfigError
from elche.runtime.process.launch import launch
from elche.runtime.process.launch_config import (
    LaunchConfig,
    LaunchResult,
    python_command,
)

RANK = "benchmarks.chaos_rank"
MS_PER_SAMPLE = 1.25
MOST_REJOINS = 10_000
POLICIES = "cadence", "async", "sync", "auto"


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """What is tried, and for how long.

    Attributes:
        minutes: all disturbed runs together, without their start; an undisturbed one
            takes as long.
        ranks: of a run at its start.
        mtbf_s: mean time between two kills.
        policy: one of `POLICIES`.
        seed: of kills and data.
        victims: who is killed: one of `VICTIMS`.
    """

    minutes: float = 1.0
    ranks: int = 4
    mtbf_s: float = 20.0
    policy: str = "async"
    seed: int = 0
    victims: str = RANKS

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
        coordinators: coordinators that were.
        longest_s: between two batches of a rank, the most.
        joins: ranks that trained in place of others.
        seconds: from the first batch to the end.
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
    coordinators: int = 0
    longest_s: float = math.nan
    joins: list[int] = field(default_factory=list)
    seconds: float = 0.0
    loss: float = math.nan
    failure: str = ""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.progress / self.seconds if self.seconds else math.nan

    def faults(self) -> list[str]:
        """What does not agree, in words."""
        if self.failure:
            return [self.failure]
        found = []
        least, most = self.counted
        # The last epoch is left early, perhaps after its last batch.
        if not self.epochs <= least <= most <= self.epochs + 1:
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


def one_run(
    config: ChaosConfig, draws: random.Random, seconds: float, mtbf_s: float
) -> RunAccount:
    """Trains until the time is over."""
    with tempfile.TemporaryDirectory(prefix="elche-chaos-") as name:
        folder, said = Path(name), dict[int, dict[str, Any]]()
        plan = KillPlan(
            ranks=config.ranks,
            seconds=seconds,
            mtbf_s=mtbf_s,
            victims=config.victims,
        )
        killer = Killer(plan, draws, folder / OVER)

        def on_line(rank: int, line: str) -> None:
            try:
                values = json.loads(line)
            except ValueError:
                sys.stderr.write(line + "\n")
                return
            if "pid" in values:
                killer.begin(rank, values["pid"], "trains" in values)
            else:
                killer.stop()
                said[rank] = values

        spec = {"policy": config.policy, "seed": config.seed, "folder": name}
        result = launch(
            LaunchConfig(
                command=python_command("-m", RANK, json.dumps(spec)),
                speeds=(1.0,) * config.ranks,
                ms_per_sample=MS_PER_SAMPLE,
                environment={"OMP_NUM_THREADS": "1"},
                on_line=on_line,
                rejoin=MOST_REJOINS,
            )
        )
        killer.end()
        kills = killer.kills
        account = RunAccount(
            kills=kills,
            coordinators=killer.coordinators,
            joins=[rank for rank in killer.trained if rank >= config.ranks],
            seconds=killer.seconds,
        )
        account.failure = lost(result, kills, killer.living, [*said])
        if not account.failure and len(said) < config.ranks:
            account.failure = f"only ranks {sorted(said)} trained at the end"
        if account.failure:
            return account
        first = next(iter(said.values()))
        account.epochs, account.loss = first["epochs"], first["loss"]
        account.counted = tuple(first["counted"])
        account.samples, account.progress = first["samples"], first["progress"]
        account.checksums = [each["checksum"] for each in said.values()]
        account.longest_s = max(each["longest_s"] for each in said.values())
        account.missing = missing(logs_in(folder), account.epochs)
    return account


def lost(
    result: LaunchResult,
    kills: Sequence[int],
    living: Sequence[int],
    said: Sequence[int],
) -> str:
    """Why the run counts as lost; "" if it ended as it should."""
    codes = {
        rank: code
        for rank, code in enumerate(result.exit_codes)
        if code and rank not in kills
    }
    if result.exit_code or codes:
        return f"the run was lost, codes {codes}: {result.reason or 'by itself'}"
    silent = sorted({*living} - {*said})
    return f"the run was lost: ranks {silent} said nothing" if silent else ""


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


def measure(config: ChaosConfig) -> list[RunAccount]:
    """An undisturbed run, then disturbed ones until as much time is over."""
    draws = random.Random(config.seed)
    left_s = 60.0 * config.minutes
    runs = [one_run(config, draws, left_s, math.inf)]
    while left_s > 0.0:
        runs.append(one_run(config, draws, left_s, config.mtbf_s))
        left_s -= max(1.0, runs[-1].seconds)
    return runs


def table(runs: Sequence[RunAccount]) -> str:
    """What was measured, as text; the first run is the undisturbed one."""
    lines = [
        f"{'run':>4} {'seconds':>7} {'kills':>5} {'joins':>5} {'epochs':>6} "
        f"{'samples':>9} {'goodput':>7} {'loss':>8}  accounts"
    ]
    calm = runs[0]
    for number, run in enumerate(runs):
        name = str(number - 1) if number else "calm"
        goodput = run.rate / calm.rate if calm.progress else math.nan
        lines.append(
            f"{name:>4} {run.seconds:>7.1f} {len(run.kills):>5} "
            f"{len(run.joins):>5} {run.epochs:>6} {run.progress:>9.0f} "
            f"{goodput:>7.3f} {run.loss:>8.4f}  {'; '.join(run.faults()) or 'agree'}"
        )
        if run.kills:
            lines.append(f"     killed: {', '.join(map(str, run.kills))}")
        if run.coordinators:
            lines.append(
                f"     coordinators killed: {run.coordinators}; the longest "
                f"pause of a rank: {run.longest_s:.2f} s"
            )
    lines.append("goodput: samples per second over the undisturbed run's")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table; the exit code is 1 where accounts do not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mtbf", type=float, default=20.0, help="seconds")
    parser.add_argument("--policy", choices=POLICIES, default="async")
    parser.add_argument("--victims", choices=VICTIMS, default=RANKS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    runs = measure(
        ChaosConfig(
            minutes=asked.minutes,
            ranks=asked.ranks,
            mtbf_s=asked.mtbf,
            policy=asked.policy,
            seed=asked.seed,
            victims=asked.victims,
        )
    )
    print(table(runs))
    sys.exit(1 if any(run.faults() for run in runs) else 0)


if __name__ == "__main__":
    main()
