"""Contenders on real CPU ranks of which one is slow; nothing is emulated.

    python -m benchmarks.real_compute --quota 1,0.3
    python -m benchmarks.real_compute --loader-ms 0,0.6 --rate steady
    python -m benchmarks.real_compute --quota 1,0.3 --slow-s 20,50 --seconds 100

A rank is held to a part of its core (`benchmarks.throttle`), or its data set takes so
long for every sample. With ``--slow-s`` it is held in this time only, and only `sync`
and the fast rank alone run. The loop sets its learning rate by hand, unless it is given
``--rate steady``. Each rank needs a core. The bounds are of a line through the times of
two batch sizes that each device runs alone. glibc keeps its memory for all alike: what
plain PyTorch loses by giving it back each step would flatter the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import Dataset

from benchmarks.hetero.bounds import ContenderBounds
from benchmarks.hetero.contender import BenchContender, BenchSpec
from benchmarks.hetero.verdict import CONTROL, BenchVerdict
from benchmarks.pipeline.bench import import_path
from elche.demo.compare import ContenderRun, Devices, run_contender
from elche.demo.contender import main as run_rank
from elche.demo.workload import Workload
from elche.monitor.results import print_table
from elche.runtime.process.environment import read_placement
from elche.runtime.run import Run

SAMPLES = 400_000
"""Of the data set; no contender comes to its end."""
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
SMALL = 4
"""The second batch size alone is this part of the first."""
BIN_S = 5.0
"""Throughput is shown of every so many seconds."""
SETTLED_BINS = 2
"""After these, shares and excluded ranks have to be right."""
ASK_EVERY = 8
"""Steps between two checks whether DDP's ranks stop: each is a reduction."""


class SlowDataset(Dataset[Any]):
    """Another data set, each of whose samples takes a time to load."""

    def __init__(self, found: Any, sample_s: float) -> None:
        self._found, self._sample_s = found, sample_s

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return self._found[index]


class SlowedContender(BenchContender):
    """A contender whose rank is slow as the environment says."""

    def __init__(self, spec: BenchSpec) -> None:
        super().__init__(spec)
        if os.environ.get("RATE") == "steady":
            self._rates = []  # the loop sets none
        self._bins: list[tuple[float, int]] = []
        self._asked = 0

    def _is_last(self, train_s: float) -> bool:
        """Of DDP's ranks together: one that stops alone lets the others wait."""
        is_last = super()._is_last(train_s)
        if "ddp" not in self.spec.kind:
            return is_last
        self._asked += 1
        if self._asked % ASK_EVERY:
            return False
        over = torch.tensor(float(is_last))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        return bool(over)

    def _count(self, samples: int) -> None:
        super()._count(samples)
        now_s = self._clock()
        if not self._bins or now_s >= self._bins[-1][0] + BIN_S:
            self._bins.append((now_s, self._progress_samples()))

    def _details(self, run: Run | None) -> dict[str, Any]:
        rates = [
            (later[1] - before[1]) / (later[0] - before[0])
            for before, later in pairwise(self._bins)
        ]
        return {**super()._details(run), "rates": rates}

    def _build_workload(self) -> Workload:
        workload, place = super()._build_workload(), read_placement().rank
        quota, loader_ms = json.loads(os.environ["SLOWED"])[place]
        if quota < 1:
            words = [sys.executable, "-m", "benchmarks.throttle", str(quota)]
            words += os.environ["SLOW_S"].split(",")
            subprocess.Popen(words)  # ends with this process
        if not loader_ms:
            return workload
        slow = SlowDataset(workload.train_dataset, loader_ms / 1e3)
        return dataclasses.replace(workload, train_dataset=slow)


class RealBench:
    """All contenders, one after the other.

    Args:
        slowed: quota and milliseconds per loaded sample of each rank.
        batch_size: of all ranks together.
        seconds: of each contender.
    """

    def __init__(
        self, slowed: list[tuple[float, float]], batch_size: int, seconds: float
    ) -> None:
        self._slowed, self._batch_size, self._seconds = slowed, batch_size, seconds
        self._devices = Devices(names=("cpu",) * len(slowed))

    def measure(self) -> BenchVerdict:
        """Runs them; the table is the verdict's."""
        ranks = range(self._devices.count)
        runs = {f"solo-{rank}": self._alone(rank) for rank in ranks}
        rates = [runs[f"solo-{rank}"].rate() for rank in ranks]
        small = self._batch_size // SMALL
        costs_s = []  # slope of two batch sizes
        for rank in ranks:
            small_s = small / self._alone(rank, small).rate()
            whole_s = self._batch_size / rates[rank]
            costs_s.append(max(1e-9, (whole_s - small_s) / (self._batch_size - small)))
        runs[CONTROL] = self._run(CONTROL, kind="solo")
        runs["ddp"] = self._run("ddp", kind="ddp")
        by_hand = tuple(rates)
        runs["ddp-split"] = self._run("ddp-split", kind="ddp-split", shares=by_hand)
        for policy in ("sync", "async"):
            name = f"elche-{policy}"
            runs[name] = self._run(name, kind="elche", policy=policy)
        self._alone(0)  # once more: how much the machine has changed meanwhile
        bounds = ContenderBounds(
            batch_size=self._batch_size,
            speeds=tuple(costs_s[0] / cost_s for cost_s in costs_s),
            sample_s=costs_s[0],
            alone=rates,
        )
        return BenchVerdict(
            {name: [run] for name, run in runs.items()},
            self._devices.count,
            time_capped=True,
            allow_noise=True,
            bound=lambda name, alone: bounds.efficiency(name),
        )

    def compare(self) -> None:
        """Runs `sync` between two runs of the fast rank alone."""
        self._alone(0)
        self._run("elche-sync", kind="elche", policy="sync")
        self._alone(0)

    def _alone(self, rank: int, batch_size: int | None = None) -> ContenderRun:
        return self._run(
            f"solo-{rank}", rank, kind="solo", batch_size=batch_size or self._batch_size
        )

    def _run(self, name: str, rank: int | None = None, **settings: Any) -> ContenderRun:
        slowed, devices = self._slowed, self._devices
        if rank is not None:
            slowed, devices = slowed[rank : rank + 1], devices.only(rank)
        os.environ["SLOWED"] = json.dumps(slowed)
        spec = BenchSpec(
            model="mlp",
            samples=SAMPLES,
            out="",
            max_seconds=self._seconds,
            **{"batch_size": self._batch_size, **settings},
        )
        run = run_contender(name, spec, devices, module="benchmarks.real_compute")
        rates = run.ranks[0]["rates"]
        settled = f"{mean(rates[SETTLED_BINS:]):.0f}" if rates[SETTLED_BINS:] else "?"
        print(
            f"{name} {spec.batch_size}: {run.rate():.0f} samples/s, {settled} after "
            f"{SETTLED_BINS * BIN_S:g} s; by {BIN_S:g} s:",
            *(f"{rate:.0f}" for rate in rates),
            file=sys.stderr,
        )
        return run


def numbers(text: str) -> list[float]:
    """Parses ``1,0.3``."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quota", type=numbers, default=[1.0, 1.0])
    parser.add_argument("--loader-ms", type=numbers, default=[0.0, 0.0])
    parser.add_argument("--slow-s", help="FROM,UNTIL, of the quota")
    parser.add_argument("--rate", choices=("moves", "steady"), default="moves")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=12.0)
    asked = parser.parse_args()
    os.environ.update({**KEPT, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()})
    os.environ.update({"RATE": asked.rate, "SLOW_S": asked.slow_s or "0,inf"})
    slowed = list(zip(asked.quota, asked.loader_ms, strict=True))
    bench = RealBench(slowed, asked.batch_size, asked.seconds)
    if asked.slow_s:
        bench.compare()
        return
    verdict = bench.measure()
    title = f"mlp on real CPU ranks (quota, loader ms): {slowed}"
    print_table(verdict.table, title)
    print("\n" + "\n".join(w for w in verdict.remarks if not w.startswith("Emulated")))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("spec.json"):
        torch.set_num_threads(1)
        run_rank(sys.argv[1], SlowedContender, BenchSpec)
    else:
        main()
