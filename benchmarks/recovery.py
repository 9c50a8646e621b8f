"""How long survivors take to train again after a rank is killed: `python recovery.py`.

From ranks that have imported torch before; each kill is a run of its own. Beside the
whole time (the kill to the next trained batch of the slowest survivor) stand its parts:
until the slowest survivor knows of the death, until it has formed the new group, and
until it has trained on its next batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import elche
from elche.runtime.process.coordinator import serve_in_thread
from elche.runtime.process.worker import Worker
from elche.runtime.windows.regrouping import Regrouping
from elche.runtime.windows.step_regrouping import StepRegrouping
from tests.harness.rank_pool import RankPool

SAMPLES = 4_000
WIDTH = 256
DRAWN = 2_000_000
ON_S = 1.0
"""So long survivors train on, so that each has trained before one breaks off."""
PARTS = ("total_s", "detection_s", "regroup_s", "first_batch_s")


def rank(policy: str, transport: str, victim: int, delay_s: float) -> dict[str, float]:
    """Trains until the victim is dead and a batch is trained; times by one clock."""
    own = int(os.environ["RANK"])
    times: dict[str, float] = {}

    def note(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            times.setdefault(key, time.monotonic())
            return result

        setattr(owner, name, wrapped)

    hear_of = Worker.hear_of

    def heard(worker: Worker, *regroups: Any) -> None:
        hear_of(worker, *regroups)
        if len(worker.members) < worker.world_size:
            times.setdefault("heard", time.monotonic())

    Worker.hear_of = heard  # type: ignore[method-assign]
    note(Regrouping, "form", "formed")
    note(StepRegrouping, "form", "formed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(10, (SAMPLES,)))
    model, optimizer, loader = elche.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        # One epoch is longer than the run, which a break ends for all ranks.
        DataLoader(data, 32, sampler=RandomSampler(data, True, DRAWN)),
        policy=policy,
        transport=elche.TransportConfig(kind=transport),
        leave_out=False,
    )
    for epoch in range(1000):
        for number, (x, y) in enumerate(loader):
            if own == victim and (epoch, number) == (0, 3):
                threading.Timer(delay_s, die).start()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "formed" in times:
                times.setdefault("trained", time.monotonic())
                if time.monotonic() - times["trained"] > ON_S:
                    break  # which ends the epoch for all
        if "trained" in times:
            break
    elche.shutdown()
    return times


def die() -> None:
    """Writes down when, and is gone."""
    Path(os.environ["KILLED_AT"]).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def one(
    ranks: int, policy: str, transport: str, draws: random.Random, killed_at: Path
) -> dict[str, float]:
    """One kill; its times in seconds."""
    victim, delay_s = draws.randrange(1, ranks), draws.uniform(0.0, 0.3)
    with RankPool(ranks) as pool:

        def fence(rank: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool.pids[rank], signal.SIGKILL)

        outcomes = pool.run(
            rank,
            *(policy, transport, victim, delay_s),
            case_setup=partial(serve_in_thread, fence=fence),
            env=[{"KILLED_AT": str(killed_at)}] * ranks,
            expect_failure=True,
        )
    survivors = [each for each in outcomes if each.rank != victim]
    errors = [str(each.error) for each in survivors if each.error]
    if errors:
        raise SystemExit("a run was lost:\n" + "\n".join(errors))
    began_s = float(killed_at.read_text())
    slowest = max((each.value for each in survivors), key=lambda t: t["trained"])
    return {
        "total_s": slowest["trained"] - began_s,
        "detection_s": slowest["heard"] - began_s,
        "regroup_s": slowest["formed"] - slowest["heard"],
        "first_batch_s": slowest["trained"] - slowest["formed"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--policy", nargs="+", default=["sync", "cadence", "async"])
    parser.add_argument("--transport", nargs="+", default=["auto", "gloo"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    cells = []
    folder = tempfile.TemporaryDirectory()
    killed_at = Path(folder.name, "killed")
    for policy in asked.policy:
        for transport in asked.transport:
            draws = random.Random(f"{asked.seed} {policy} {transport}")
            runs = [
                one(asked.ranks, policy, transport, draws, killed_at)
                for _ in range(asked.kills)
            ]
            cells.append({"policy": policy, "transport": transport, "runs": runs})
            print(f"{policy}, {transport}, {asked.ranks} ranks, {len(runs)} kills:")
            for part in PARTS:
                values = [run[part] for run in runs]
                print(
                    f"  {part:14} median {statistics.median(values):.3f}, "
                    f"worst {max(values):.3f}"
                )
    folder.cleanup()
    if asked.json is not None:
        asked.json.write_text(json.dumps({"ranks": asked.ranks, "cells": cells}))


if __name__ == "__main__":
    main()
