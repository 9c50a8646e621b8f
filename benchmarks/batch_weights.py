"""What `weight_of=` costs a rank, per step: processor time of the training thread.

    OMP_NUM_THREADS=1 python benchmarks/batch_weights.py --json weights.json

On one device, and on two ranks under `sync` and `async`. Runs without it, with a
function that returns a constant, and with one that counts labels, one after the other;
of each the second epoch counts. Printed is the median of the differences to the run
without it of the same round, and its 95 % interval. The model is so small that a step
is nearly all Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from control_overhead import interval
from record import write_record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ElcheError
from elche.runtime.process.launch import LaunchConfig, launch, python_command

PLACES = {"one device": (1, "sync"), "sync": (2, "sync"), "async": (2, "async")}
SIZE = 8
WEIGHERS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "constant": lambda batch: SIZE,
    "counts labels": lambda batch: (batch[1] != -100).sum(),
}


def step_us(policy: str, steps: int, weight_of: Callable[[Any], Any] | None) -> float:
    """Processor time of a step of the second epoch, on this rank."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.ones(steps * SIZE, dtype=torch.int64)
    data = TensorDataset(torch.randn(steps * SIZE, 4), labels)
    by_samples = elche.WindowConfig(drift_weights="samples")
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        DataLoader(data, SIZE),
        policy=policy,
        windows=elche.WindowConfig() if policy == "sync" else by_samples,
        weight_of=weight_of,
    )
    done, took_s = 0, 0.0
    for _ in range(2):
        began_s, done = time.thread_time(), 0
        for x, _ in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        took_s = time.thread_time() - began_s
    elche.shutdown()
    return took_s / max(1, done) * 1e6


def rounds_of(policy: str, steps: int, rounds: int) -> list[list[float]]:
    """µs per step of each weigher, round by round; a first round does not count."""
    torch.set_num_threads(1)
    found = [
        [step_us(policy, steps, each) for each in WEIGHERS.values()]
        for _ in range(rounds + 1)
    ]
    return found[1:]


def measure(place: str, args: argparse.Namespace) -> list[list[list[float]]]:
    """The rounds of every rank."""
    ranks, policy = PLACES[place]
    with tempfile.TemporaryDirectory() as folder:
        words = [policy, str(args.steps), str(args.rounds), folder]
        result = launch(
            LaunchConfig(
                command=python_command(__file__, "--rank", *words),
                devices=("cpu",) * ranks,
                environment={"OMP_NUM_THREADS": "1"},
                on_line=lambda rank, line: None,
            )
        )
        if result.exit_code:
            raise ElcheError(f"{place}: {result.reason}")
        paths = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) for path in paths]


def rank_main(policy: str, steps: str, rounds: str, folder: str) -> None:
    """One rank's process."""
    found = rounds_of(policy, int(steps), int(rounds))
    (Path(folder) / f"{elche.rank()}.json").write_text(json.dumps(found))


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=1000, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for place in PLACES:
        for rank, rounds in enumerate(measure(place, args)):
            without, *others = zip(*rounds, strict=True)
            words = [f"{place:10} rank {rank}: step {statistics.median(without):6.1f}"]
            for name, times in zip(list(WEIGHERS)[1:], others, strict=True):
                added = [t - w for t, w in zip(times, without, strict=True)]
                median, low, high = interval(added)
                words.append(f"{name} +{median:.1f} ({low:.1f} to {high:.1f})")
                figures[f"{place}, rank {rank}, {name}"] = [median, low, high]
            print("; ".join(words), "µs", flush=True)
    write_record(args.json, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        main()
