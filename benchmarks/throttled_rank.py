"""Time until a rank that was really throttled has its share back under ``sync``.

Two equal ranks on the CPU compute what they compute; one of them is stopped and
continued (SIGSTOP, SIGCONT) at a duty cycle for some seconds, then let go. Its share is
read from the sizes of its batches.

Run: ``python benchmarks/throttled_rank.py --runs 10``.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from throttle import stop_and_go

WINDOW = 20
"""Steps that a share is the mean of."""
BACK = 0.75
"""Part of its share of before that a rank must have again."""
DEADLINE_S = 60.0


def train(folder: Path) -> None:
    """What a rank runs, until it is killed: each batch's size and time to a file."""
    import torch
    from torch import nn

    import elche

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(768, 10))
    data = torch.utils.data.TensorDataset(
        torch.randn(6400, 512), torch.randint(10, (6400,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = elche.setup(model, optimizer, loader, policy="sync")
    if elche.rank() == 1:
        (folder / "pid").write_text(str(os.getpid()))
    with (folder / f"rank{elche.rank()}").open("w", buffering=1) as log:
        while True:
            for x, y in loader:
                log.write(f"{time.monotonic()} {len(x)}\n")
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


class Steps:
    """What rank 1 has written so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def since(self, began_s: float) -> list[tuple[float, int]]:
        """Time and samples of every whole step since then."""
        path = self._folder / "rank1"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        read = [(float(at), int(n)) for at, n in (line.split() for line in lines)]
        return [(at, n) for at, n in read if at >= began_s]

    def wait(self, began_s: float, least: float) -> float:
        """Seconds until the mean share of some steps is so large; inf at the end."""
        while time.monotonic() < began_s + DEADLINE_S:
            steps = self.since(began_s)
            for i in range(len(steps) - WINDOW + 1):
                if fmean(n for _, n in steps[i : i + WINDOW]) >= least:
                    return steps[i + WINDOW - 1][0] - began_s
            time.sleep(0.05)
        return float("inf")


def measure(period_s: float, duty: float, throttled_s: float) -> tuple[float, ...]:
    """Share before, least share while throttled, seconds until it is back."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "elche", "run", "--nproc", "2"]
        run = subprocess.Popen(
            [*command, __file__, "--folder", name],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            steps = Steps(folder)
            if math.isinf(steps.wait(time.monotonic(), 0.0)):
                raise SystemExit(f"expected {WINDOW} steps of rank 1, none came")
            time.sleep(3.0)
            before = fmean(n for _, n in steps.since(time.monotonic() - 2.0))
            pid = int((folder / "pid").read_text())
            fallen = before
            while fallen > before / 2:  # a busy machine may slow the others as much
                until_s = time.monotonic() + throttled_s
                while time.monotonic() < until_s:
                    stop_and_go(pid, duty, period_s)
                released_s = time.monotonic()
                fallen = fmean(n for _, n in steps.since(released_s - 1.0))
            return before, fallen, steps.wait(released_s, BACK * before)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def main() -> None:
    """Measures so many runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--period-ms", type=float, default=20.0)
    parser.add_argument("--duty", type=float, default=0.3)
    parser.add_argument("--throttled-s", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        train(asked.folder)
    print("share of 64 before, throttled; seconds until 75 % of it are back")
    for _ in range(asked.runs):
        found = measure(asked.period_ms / 1e3, asked.duty, asked.throttled_s)
        print("{:6.1f} {:6.1f} {:6.2f}".format(*found), flush=True)


if __name__ == "__main__":
    main()
