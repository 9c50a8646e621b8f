"""Short epochs in which ranks die, counted by the model; and a driver of random kills.

``python -m tests.distributed.cases.epoch_ends RUNS`` starts runs by `elche.launch`,
kills ranks at random moments, and prints how many runs were lost or not exact.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import elche
from elche import session
from elche.launching import launching
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


def train_once(folder: str, policy: str, epochs: int, kills: dict[int, float]) -> None:
    """As a rank of a run that `main` starts; leaves a file of how it ended."""
    rank, killer = int(os.environ["RANK"]), None

    def end() -> None:
        Path(folder, f"killed {rank}").touch()
        die()

    if rank in kills:
        killer = threading.Timer(kills[rank], end)
    state, visits = train(policy, epochs, killer=killer)
    norm = float(sum(value.double().square().sum() for value in state.values()))
    said = f"{visits == [epochs] * SAMPLES} {norm!r}"
    Path(folder, f"through {rank}").write_text(said)


def main(runs: int) -> None:
    """Random kills of real processes: one of three ranks, or two, at any moment."""
    launching._is_defined_in_notebook = lambda _: True  # type: ignore[assignment] # ranks are forks
    draw, lost, kills = random.Random(31), 0, 0
    for number in range(runs):
        policy, epochs = POLICIES[number % len(POLICIES)], draw.randint(6, 10)
        victims = draw.sample(range(3), draw.choice((1, 1, 2)))
        after_s = {rank: draw.uniform(0.02, 4.0) for rank in victims}
        with tempfile.TemporaryDirectory() as name:
            error, folder = "", Path(name)
            try:
                elche.launch(train_once, 3, args=(name, policy, epochs, after_s))
            except elche.ElcheError as failed:
                error = str(failed)
            dead = len([*folder.glob("killed *")])
            said = [path.read_text() for path in folder.glob("through *")]
        kills += dead
        is_right = not error and len(said) == 3 - dead and len({*said}) == 1
        lost += not (is_right and said[0].startswith("True"))
        print(
            f"{number} {policy} {epochs} {after_s} {dead} dead {said} {error}",
            flush=True,
        )
    print(f"{runs} runs, {kills} kills, {lost} lost or not exact")


if __name__ == "__main__":
    main(int(sys.argv[1]))
