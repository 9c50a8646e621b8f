"""What elche's control costs a rank, per batch: the loop's body is empty.

    OMP_NUM_THREADS=1 python benchmarks/control_overhead.py --json control.json

Two ranks and the coordinator. Every rank alternates epochs through elche's loader with
passes over a plain DataLoader, over as many batches of as many samples. Printed is the
median of the differences and its 95 % interval, by policy and rank: processor time of
the training thread, whose bar is 50 µs a batch, with what a window's reduction and an
epoch's beginning cost it; and wall time, in which the ranks wait for each other and
share what cores there are.

``--against FOLDER`` names another checkout: runs of it and of this one take turns
(``--turns``), and printed is also the median of the differences between the two runs of
a turn, in µs of processor time. ``--layers N`` trains a model of N layers instead of
one: what is done for each parameter at every step shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
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
from elche.runtime.process.launch import LaunchConfig, launch, python_command

POLICIES = ("sync", "cadence", "async")
RANKS = 2
BATCH_SIZE = 8
FEATURES = 4
SETTLED_AFTER = 2
"""Pairs that are not counted: windows find their length in the first epochs."""
COLUMNS = ("processor", "wall")
ROOT = Path(__file__).resolve().parents[1]
Differences = list[list[float]]


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


def measure(policy: str, batches: int, pairs: int, layers: int) -> Differences:
    """Differences of every pair, by column: the part of one rank."""
    torch.set_num_threads(1)
    hidden = [torch.nn.Linear(FEATURES, FEATURES) for _ in range(layers - 1)]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(FEATURES, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = data(batches * RANKS, BATCH_SIZE)
    loader = DataLoader(whole, batch_size=BATCH_SIZE, shuffle=True)
    _, _, ours = elche.setup(model, optimizer, loader, policy=policy)
    shared = RANKS if policy == "sync" else 1
    size = BATCH_SIZE // shared
    differences: Differences = []
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


def of_rank(differences: Differences) -> dict[str, Any]:
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


def one_run(policy: str, tree: Path, args: argparse.Namespace) -> list[Differences]:
    """Differences by rank, of the elche that is in this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        words = [policy, str(args.batches), str(args.pairs), str(args.layers), folder]
        # Its own launcher, so that the coordinator is of the same checkout.
        command = [sys.executable, __file__, "--launch", *words]
        paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(RANKS)
        ]


def launch_main(*words: str) -> None:
    """The process that starts the ranks and serves them."""
    result = launch(
        LaunchConfig(
            command=python_command(__file__, "--rank", *words),
            devices=("cpu",) * RANKS,
            environment={"OMP_NUM_THREADS": "1"},
        )
    )
    if result.exit_code:
        raise ElcheError(f"{words[0]}: {result.reason}")


def rank_main(policy: str, batches: str, pairs: str, layers: str, folder: str) -> None:
    """One rank's process."""
    differences = measure(policy, int(batches), int(pairs), int(layers))
    path = Path(folder) / f"{elche.rank()}.json"
    path.write_text(json.dumps(differences))
    elche.shutdown()


def show(title: str, found: dict[str, Any]) -> None:
    """One line of the table."""
    words = []
    for name in COLUMNS:
        of = found[name + "_us"]
        words.append(
            f"{name}: plain {of['plain']:5.1f} µs, added {of['added']:5.1f} "
            f"({of['low']:.1f} to {of['high']:.1f})"
        )
    print(f"{title}; " + "; ".join(words), flush=True)


def compare(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of this checkout, and of the other one, by rank; printed as they come."""
    trees = {"": ROOT, **({"before": args.against} if args.against else {})}
    runs: dict[str, list[list[Differences]]] = {name: [] for name in trees}
    for turn in range(args.turns if args.against else 1):
        for name in list(trees)[:: 1 if turn % 2 else -1]:
            runs[name].append(one_run(policy, trees[name], args))
    figures: dict[str, Any] = {}
    for name, of_turns in runs.items():
        for rank, parts in enumerate(zip(*of_turns, strict=True)):
            found = of_rank([pair for part in parts for pair in part])
            figures[f"rank {rank} {name}".strip()] = found
            show(f"{policy:8} rank {rank} {name}", found)
    if args.against:
        saved = [
            statistics.median(of_pairs(old)) - statistics.median(of_pairs(new))
            for before, now in zip(runs["before"], runs[""], strict=True)
            for old, new in zip(before, now, strict=True)
        ]
        middle, low, high = interval(saved)
        figures["saved_us"] = {"median": middle, "low": low, "high": high, "all": saved}
        print(f"{policy:8} saved {middle:.1f} µs ({low:.1f} to {high:.1f})", flush=True)
    return figures


def of_pairs(differences: Differences) -> list[float]:
    """What was added in processor time, pair by pair."""
    return [pair[0] for pair in differences]


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--batches", type=int, default=1500, help="of a rank, an epoch")
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, to compare")
    parser.add_argument("--turns", type=int, default=6, help="runs of each, to compare")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {policy: compare(policy, args) for policy in args.policies}
    write_record(args.json, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--launch"]:
        launch_main(*sys.argv[2:])
    else:
        main()
