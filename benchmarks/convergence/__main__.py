"""What ways of sharing a training cost in samples, on virtual ranks in one process.

    python -m benchmarks.convergence --study star
    python -m benchmarks.convergence --table --results docs/convergence_runs.jsonl

The first runs what is missing of a study, one thread, and prints its table; every run
is a line of `--results`, so it may be stopped and begun again (`--seconds`). The second
only prints. All studies take half an hour of a core. `docs/convergence.md` says what
was found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from benchmarks.convergence.engine import train
from benchmarks.convergence.method import Method
from benchmarks.convergence.report import Line, line, table
from benchmarks.convergence.results import Results, Setting
from benchmarks.convergence.search import Trial, wanted
from benchmarks.convergence.study import ALONE, STUDIES
from benchmarks.convergence.tasks import Text

COLUMNS = 4
"""Runs that are trained side by side."""


def run(trials: Sequence[Trial], results: Results, seconds: float) -> bool:
    """Runs what is missing, in order.

    Args:
        trials: what is wanted.
        results: what is known; grows.
        seconds: begin nothing after so long.

    Returns:
        Whether nothing is missing any more.
    """
    started_s = time.monotonic()
    task: Text | None = None
    for trial in trials:
        setting = trial.setting
        while columns := wanted(trial, results)[:COLUMNS]:
            if time.monotonic() - started_s > seconds:
                return False
            task = task or Text()
            begun_s = time.monotonic()
            values = train(task, setting.method, columns, setting.batches)
            for column, value in zip(columns, values, strict=True):
                results.add(setting, column.lr, column.seed, value)
                print(setting.key(), column.lr, column.seed, f"{value:.4f}", flush=True)
            print(f"  {time.monotonic() - begun_s:.1f} s", flush=True)
    return True


def lines(trials: Sequence[Trial], results: Results) -> list[Line]:
    """The lines of a study's table, as far as they were run."""
    found = []
    for trial in {each.setting.key(): each for each in trials}.values():
        setting = trial.setting
        optimizer = setting.method.optimizer
        single = replace(setting, method=Method(optimizer=optimizer))
        lr = results.best(single, (0,))
        if lr is None:
            continue
        made = line(setting, results, results.of(single)[lr], curve_of(results, single))
        found += [made] if made is not None else []
    return found


def curve_of(results: Results, single: Setting) -> dict[int, float]:
    """Mean loss of one device by the length of its run, each at its best rate."""
    if single.task == "text" and single.method == Method():
        return ALONE
    found = {}
    for length in ALONE:
        setting = replace(single, batches=length)
        lr = results.best(setting, (0,))
        if lr is not None:
            found[length] = mean(results.of(setting)[lr].values())
    return found if len(found) > 1 else {}


def main() -> None:
    """Runs a study, or prints its table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", choices=["all", *STUDIES], default="all")
    parser.add_argument("--results", type=Path, default=Path("convergence.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results)
    results.load()
    names = list(STUDIES) if args.study == "all" else [args.study]
    started_s = time.monotonic()
    for name in names:
        left_s = args.seconds - (time.monotonic() - started_s)
        trials = STUDIES[name]()
        if not args.table and not run(trials, results, left_s):
            print("more to run")
            return
        print(f"{name}\n\n{table(lines(trials, results))}\n")
    print("complete")


if __name__ == "__main__":
    main()
