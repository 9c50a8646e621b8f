"""Short epochs in which ranks die, counted by the model; and a driver of random kills.

``python -m tests.distributed.cases.epoch_ends RUNS`` starts runs under ``elche run``,
kills ranks at random moments, and prints what was lost.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

import elche
from elche import session
from elche.runtime.epochs.window_epoch import WindowEpoch
from tests.distributed.cases.auto_deaths import Ones, Visited
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.survive_cases import Death, Indices, die, plan_death

SAMPLES, BATCH = 640, 16
POLICIES = ("sync", "cadence", "async", "auto")


def train(
    policy: str,
    epochs: int,
    deaths: tuple[Death, ...] = (),
    killer: threading.Timer | None = None,
    saves: str = "",
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Trains and dies where planned; the model's state, and visits of each sample."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = Visited()
    optimizer: Any = Ones(model.parameters(), lr=1.0)
    loader: Any = DataLoader(Indices(SAMPLES), batch_size=BATCH, shuffle=True)
    more: dict[str, Any] = {}
    if policy != "sync":
        average = elche.OuterConfig(optimizer="average")
        more["windows"] = elche.WindowConfig(outer=average)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader), policy=policy, timeout_s=60.0, **more
    )
    for death in deaths:
        if death.rank == rank:
            plan_death(death, "", Meeting("barrier", "", rank))
    run = session.current_run()
    for epoch in elche.epochs(epochs):
        if epoch == 0 and killer is not None:
            killer.start()
        for index in loader:
            in_windows = isinstance(run._epochs.under_way, WindowEpoch)
            model(index, in_windows=in_windows).backward()
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            elche.save(saves)
    if killer is not None:
        killer.cancel()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert elche.progress_samples() == SAMPLES * epochs
    elche.shutdown()
    return state, [int(visits) for visits in state["count"] - state["w"]]


def main(runs: int) -> None:
    """Random kills of real processes: one of three ranks, or two, at any moment."""
    draw, lost, kills = random.Random(31), 0, 0
    for number in range(runs):
        policy, epochs = POLICIES[number % len(POLICIES)], draw.randint(10, 20)
        victims = draw.sample(range(3), draw.choice((1, 1, 2)))
        after = {f"KILL{rank}": str(draw.uniform(0.02, 2.5)) for rank in victims}
        command = [sys.executable, "-m", "elche", "run", "--nproc", "3", __file__]
        command += [policy, str(epochs)]
        began_s = time.monotonic()
        ended = subprocess.run(
            command,
            env={**os.environ, **after, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
        )
        said = ended.stdout + ended.stderr
        through = set(re.findall(r"through (\S+ \S+)", said))
        dead = set(re.findall(r"killed (\d)", said))
        kills += len(dead)
        is_exact = len(through) == 1 and next(iter(through)).startswith("True")
        is_right = ended.returncode == 0 and is_exact
        lost += not is_right
        took_s = time.monotonic() - began_s
        print(
            f"{number} {policy} {victims} dead {sorted(dead)} {through} {took_s:.1f} s"
        )
        if not is_right:
            print(said)
        sys.stdout.flush()
    print(f"{runs} runs, {kills} kills, {lost} lost or not exact")


def one_run(policy: str, epochs: int) -> None:
    """As a rank of a driven run."""
    rank = os.environ["RANK"]

    def end() -> None:
        os.write(1, f"killed {rank}\n".encode())
        die()

    after_s = os.environ.get(f"KILL{rank}")
    killer = threading.Timer(float(after_s), end) if after_s else None
    state, visits = train(policy, epochs, killer=killer)
    is_exact = visits == [epochs] * SAMPLES
    norm = float(sum(value.double().square().sum() for value in state.values()))
    print(f"through {is_exact} {norm!r}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        one_run(sys.argv[1], int(sys.argv[2]))
    else:
        main(int(sys.argv[1]))
