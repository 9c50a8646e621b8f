"""What elche's control costs a rank, per batch: the loop's body is empty.

    OMP_NUM_THREADS=1 python benchmarks/control_overhead.py --json control.json

Two ranks and the coordinator. Every rank alternates epochs through elche's loader with
passes over a plain DataLoader, over as many batches of as many samples. Printed is the
median of the differences and its 95 % interval, by policy and rank: processor time of
the training thread, whose bar is 50 µs a batch, with what a window's reduction and an
epoch's beginning cost it; and wall time, in which the ranks wait for each other and
share what cores there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from record import write_record
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ElcheError
from elche.runtime.launch import LaunchConfig, launch, python_command

POLICIES = ("sync", "cadence", "async")
RANKS = 2
BATCH_SIZE = 8
FEATURES = 4
SETTLED_AFTER = 2
"""Pairs that are not counted: windows find their length in the first epochs."""
COLUMNS = ("processor", "wall")


def data(batches: int, batch_size: int) -> TensorDataset:
    """Samples that cost next to nothing to load."""
    samples = batches * batch_size
    return TensorDataset(torch.randn(samples, FEATURES), torch.zeros(samples))


def pass_us(loader: Iterable[Any]) -> tuple[int, float, float]:
    """Batches of one pass, and its µs per batch: of this thread, and of the wall."""
    began_s = time.thread_time(), time.perf_counter()
    batches = sum(1 for _ in loader)
    took_s = time.thread_time() - began_s[0], time.perf_counter() - began_s[1]
    scale = 1e6 / max(1, batches)
    return batches, took_s[0] * scale, took_s[1] * scale


def measure(policy: str, batches: int, pairs: int) -> list[list[float]]:
    """Differences of every pair, by column: the part of one rank."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = data(batches * RANKS, BATCH_SIZE)
    loader = DataLoader(whole, batch_size=BATCH_SIZE, shuffle=True)
    _, _, ours = elche.setup(model, optimizer, loader, policy=policy)
    shared = RANKS if policy == "sync" else 1
    size = BATCH_SIZE // shared
    differences: list[list[float]] = []
    for pair in range(SETTLED_AFTER + pairs):
        mine = pass_us(ours)
        plain = DataLoader(data(mine[0], size), batch_size=size, shuffle=True)
        theirs = pass_us(plain)
        if pair >= SETTLED_AFTER:
            differences.append(
                [mine[1] - theirs[1], mine[2] - theirs[2], theirs[1], theirs[2]]
            )
    return differences


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics about it that hold 95 %."""
    ordered = sorted(values)
    half = int(0.98 * len(ordered) ** 0.5) + 1
    middle = len(ordered) // 2
    low, high = (
        ordered[max(0, middle - half)],
        ordered[min(len(ordered) - 1, middle + half)],
    )
    return statistics.median(ordered), low, high


def of_rank(differences: list[list[float]]) -> dict[str, Any]:
    """Figures of one rank."""
    columns = list(zip(*differences, strict=True))
    figures = {}
    for number, name in enumerate(COLUMNS):
        added, low, high = interval(list(columns[number]))
        plain = statistics.median(columns[number + len(COLUMNS)])
        figures[name + "_us"] = {
            "plain": plain,
            "added": added,
            "low": low,
            "high": high,
        }
    return figures


def run_policy(policy: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures by rank."""
    with tempfile.TemporaryDirectory() as folder:
        words = [policy, str(args.batches), str(args.pairs), folder]
        result = launch(
            LaunchConfig(
                command=python_command(__file__, "--rank", *words),
                devices=("cpu",) * RANKS,
                environment={"OMP_NUM_THREADS": "1"},
                on_line=lambda rank, line: print(f"rank {rank}: {line}"),
            )
        )
        if result.exit_code:
            raise ElcheError(f"{policy}: {result.reason}")
        return [
            of_rank(json.loads((Path(folder) / f"{rank}.json").read_text()))
            for rank in range(RANKS)
        ]


def rank_main(policy: str, batches: str, pairs: str, folder: str) -> None:
    """One rank's process."""
    differences = measure(policy, int(batches), int(pairs))
    path = Path(folder) / f"{elche.rank()}.json"
    path.write_text(json.dumps(differences))
    elche.shutdown()


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--batches", type=int, default=1500, help="of a rank, an epoch")
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {}
    for policy in args.policies:
        figures[policy] = run_policy(policy, args)
        for rank, found in enumerate(figures[policy]):
            words = [f"{policy:8} rank {rank}"]
            for name in COLUMNS:
                of = found[name + "_us"]
                words.append(
                    f"{name}: plain {of['plain']:5.1f} µs, added {of['added']:5.1f} "
                    f"({of['low']:.1f} to {of['high']:.1f})"
                )
            print("; ".join(words), flush=True)
    write_record(args.json, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        main()
