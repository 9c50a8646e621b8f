"""Learning with real ranks: ways of averaging beside plain averaging and one process.

    python benchmarks/real_ranks.py --seeds 3 --json real_ranks.json

Handwritten digits (scikit-learn's, a quarter held out), a convolutional network with
BatchNorm, SGD with momentum, the same number of epochs for everybody. Ranks are real
processes on emulated devices of unequal speed, windows two batches of the slowest rank.
What `docs/convergence.md` measures with virtual ranks, the runtime has to deliver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from record import write_record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

EPOCHS = 12
BATCH_SIZE = 32
LEARNING_RATE = 0.05
HELD_OUT = 4
RUN_TIMEOUT_S = 120.0
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
SPEEDS = {1: "1", 2: "1,0.5", 3: "1,0.5,0.25"}


def two_batches(outer: str) -> elche.WindowConfig:
    """Windows of two batches of the slowest rank, with this outer optimizer."""
    return elche.WindowConfig(
        anchor=2,
        max_anchor=2,
        min_anchor=2,
        outer=elche.OuterConfig(optimizer=outer),
    )


CONTENDERS: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync"},
    "sync, int8": {"policy": "sync", "codec": "int8"},
    "sync, int4": {"policy": "sync", "codec": "int4"},
    "plain averaging": {"policy": "cadence", "windows": two_batches("average")},
    "SlowMo": {"policy": "cadence", "windows": two_batches("slowmo")},
    "Nesterov": {"policy": "cadence", "windows": two_batches("nesterov")},
    "overlapped, Nesterov": {"policy": "async", "windows": two_batches("nesterov")},
    "overlapped, int8": {
        "policy": "async",
        "windows": two_batches("nesterov"),
        "codec": "int8",
    },
}


def network() -> nn.Module:
    """Two convolutions with BatchNorm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """What is trained on, and the images and labels of the evaluation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(found.target)
    held_out = torch.arange(len(images)) % HELD_OUT == 0
    train = TensorDataset(images[~held_out], labels[~held_out])
    return train, images[held_out], labels[held_out]


def train(contender: str, seed: int) -> None:
    """One rank of one run; rank 0 prints what the model has learned."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dataset, images, labels = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=order)
    model, optimizer, shared = elche.setup(
        model, optimizer, loader, epochs=EPOCHS, **CONTENDERS[contender]
    )
    for _ in range(EPOCHS):
        for x, y in shared:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if elche.is_main_process():
        model.eval()
        with torch.no_grad():
            out = model(images)
        loss = float(F.cross_entropy(out, labels))
        wrong = float((out.argmax(1) != labels).float().mean())
        print(json.dumps({"loss": loss, "error": wrong}))
    elche.shutdown()


def run(
    contender: str, ranks: int, seed: int, ms_per_sample: float
) -> dict[str, float]:
    """One run, in processes of its own."""
    elche_run = [sys.executable, "-m", "elche", "run", "--speeds", SPEEDS[ranks]]
    done = subprocess.run(
        [
            *elche_run,
            *("--ms-per-sample", str(ms_per_sample), __file__),
            *("--contender", contender, "--seed", str(seed)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def interval(values: list[float]) -> str:
    """A mean and half its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.4f}"
    half = T_95.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.4f} ± {half:.4f}"


def main() -> None:
    """Runs all contenders and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ms-per-sample", type=float, default=0.15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", default="", help="contenders that begin with this")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--contender", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        train(options.contender, options.seed)
        return
    names = [name for name in CONTENDERS if name.startswith(options.only)]
    cases = [("sync", 1)] + [(name, n) for n in options.ranks for name in names]
    figures: dict[str, list[dict[str, float]]] = {}
    first = options.first_seed
    for seed in range(first, first + options.seeds):  # interleaved, seed by seed
        for name, ranks in cases:
            label = "one process" if ranks == 1 else f"{ranks} ranks, {name}"
            found = run(name, ranks, seed, options.ms_per_sample)
            figures.setdefault(label, []).append(found)
    base = figures["one process"]
    print(f"{'':32} held-out loss      error       loss - one process")
    for label, rows in figures.items():
        losses = [row["loss"] for row in rows]
        errors = interval([row["error"] for row in rows])
        apart = [one["loss"] - two["loss"] for one, two in zip(rows, base, strict=True)]
        print(f"{label:32} {interval(losses):18} {errors:18} {interval(apart)}")
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
