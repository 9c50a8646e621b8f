"""Ranks that join a run under way, and the account of what all hold at its end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elche
from elche.checkpoint.keeper import CheckpointKeeper
from elche.coordination.protocol.events import EpochOpened, JoinReady
from elche.runtime.process.launchers import launch_facts
from elche.runtime.process.worker import Worker
from elche.runtime.windows.regrouping import Regrouping
from elche.session.process import failing_together
from tests.distributed.cases.survive_cases import (
    Counter,
    Death,
    Indices,
    after,
    before,
    die,
    visit_events,
)

BEGIN_WITHIN_S = 60.0
MOST_EPOCHS = 200
ENOUGH_BATCHES = 5
"""That a newcomer trains on before a run may end that waits for it."""


@dataclass(frozen=True)
class Joined:
    """What a rank has at the end.

    Attributes:
        state: of the model.
        copy: of its EMA.
        progress: samples of the run.
        rate: learning rate.
        ranks: its number, place and the world's size.
        handed: digests of optimizer and model at each hand-over.
        batches: that it trained on.
        held_s: longest time between two batches of an epoch.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    copy: dict[str, torch.Tensor] = field(default_factory=dict)
    progress: float = 0.0
    rate: float = 0.0
    ranks: tuple[int, int, int] = (0, 0, 0)
    handed: list[str] = field(default_factory=list)
    batches: int = 0
    held_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that ranks join.

    Attributes:
        folder: for logs, and the word that joiners wait for.
        policy: of the run.
        founders: ranks that it begins with.
        death: rank of them that dies first; -1: nobody.
        fails: where the joiners die; "" for nowhere.
        giver: rank of the founders that dies as it hands its state over; -1: none.
        saves: a checkpoint is made in each epoch.
        other: what is another in the joiners' scripts: "lr", "model" or "loop".
        options: of the run.
        windows: settings of them beside the usual ones.
    """

    folder: str
    policy: str
    founders: int
    death: int = -1
    fails: str = ""
    giver: int = -1
    saves: bool = False
    other: str = ""
    samples: int = 640
    epochs: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, Any] = field(default_factory=dict)


def grow(plan: Plan) -> Joined:
    """Trains; ranks above the founders' join when these are on their way."""
    with failing_together():
        try:
            return _grow(plan)
        finally:
            Path(plan.folder, "ready").touch()  # nobody waits for who was refused


def _grow(plan: Plan) -> Joined:
    rank, is_joiner = int(os.environ["RANK"]), launch_facts().joins
    word, ready = Path(plan.folder, "come"), Path(plan.folder, "ready")
    if is_joiner:
        wait_for(word)
        plan_failure(plan.fails)
        visit_events(JoinReady, ready.touch, is_before=True)
    other = plan.other if is_joiner else ""
    torch.manual_seed(5 + is_joiner)
    counter = Counter(plan.samples + (other == "model"))
    if is_joiner:
        torch.nn.init.uniform_(counter.w)  # none of it may come into the run
    optimizer = torch.optim.SGD(
        counter.parameters(), lr=0.5 if other == "lr" else 1.0, momentum=0.1
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.9)
    copy = AveragedModel(counter, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    handed = watch_hand_overs(counter, optimizer)
    if rank == plan.giver:
        before(CheckpointKeeper, "hand_over", die)
    loader: Any = DataLoader(Indices(plan.samples), batch_size=16, shuffle=True)
    model, optimizer, loader = elche.setup(
        *(counter, optimizer, loader),
        policy=plan.policy,
        schedulers=[schedule],
        copies=[copy],
        timeout_s=60.0,
        windows=elche.WindowConfig(
            local_batch_size=4,
            **({"outer": elche.config.OuterConfig(optimizer="slowmo")} | plan.windows),
        ),
        **plan.options,
    )
    batches, last_s, gap_s = 0, 0.0, 0.0
    numbers = range(plan.epochs) if other == "loop" else elche.epochs(plan.epochs)
    with Path(plan.folder, f"log{rank}.txt").open("w") as log:
        for epoch in numbers:
            for number, index in enumerate(loader):
                if epoch and word.exists() and not is_joiner:
                    wait_for(ready)  # else the run may end before it is
                if last_s:
                    gap_s = max(gap_s, time.monotonic() - last_s)
                log.write(f"{epoch} {' '.join(map(str, index.tolist()))}\n")
                log.flush()
                model(index).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                copy.update_parameters(model)
                time.sleep(0.002)
                batches += 1
                last_s = time.monotonic()
                if plan.saves and number == 12:
                    elche.save(Path(plan.folder, "checkpoints"))
                if rank == plan.death and batches == 6:
                    die()
                is_time = plan.death < 0 or elche.world_size() < plan.founders
                if elche.rank() == 0 and batches >= 10 and is_time:
                    word.touch()
            last_s = 0.0
            elche.barrier()
    joined = Joined(
        cloned(model),
        cloned(copy),
        elche.progress_samples(),
        schedule.get_last_lr()[0],
        (rank, elche.rank(), elche.world_size()),
        handed,
        batches,
        gap_s,
    )
    elche.shutdown()
    return joined


def cloned(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def wait_for(path: Path) -> None:
    """Until the others have come so far."""
    deadline_s = time.monotonic() + BEGIN_WITHIN_S
    while not path.exists():
        assert time.monotonic() < deadline_s, "nobody called this rank"
        time.sleep(0.002)


def watch_hand_overs(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Digests of what this rank holds after each hand-over."""
    handed: list[str] = []

    def note() -> None:
        digest = hashlib.sha256()
        states = optimizer.state_dict()["state"]
        for state in (*(states[key] for key in sorted(states)), model.state_dict()):
            for name, value in sorted(state.items()):
                digest.update(f"{name} {torch.as_tensor(value).tolist()}".encode())
        handed.append(digest.hexdigest())

    after(CheckpointKeeper, "hand_over", note)
    return handed


def plan_failure(place: str) -> None:
    """The joiner dies there, or raises."""
    if place in ("before ready", "after ready"):
        visit_events(JoinReady, die, is_before=place.startswith("before"))
    elif place == "regrouping":
        before(Regrouping, "meet", die)
    elif place == "regrouped":
        after(Worker, "regroup", die)
    elif place == "handed":
        after(CheckpointKeeper, "hand_over", die)
    elif place == "before opened":
        visit_events(EpochOpened, die, is_before=True)
    elif place == "raises":
        after(CheckpointKeeper, "hand_over", raise_error)


def raise_error() -> None:
    raise ValueError("a fault in the joiner's script")


@dataclass(frozen=True, kw_only=True)
class Growing:
    """A run that goes on until all newcomers have trained, or are gone.

    Attributes:
        folder: of logs and signs.
        founders: ranks that it begins with.
        joiners: ranks that join it.
        deaths: of any of them.
        called_after: batches of a rank before the joiners are called.
        options: of `elche.setup`.
    """

    folder: str
    founders: int = 2
    joiners: int = 1
    deaths: tuple[Death, ...] = ()
    called_after: int = 3
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def newcomers(self) -> range:
        """Their ranks."""
        return range(self.founders, self.founders + self.joiners)

    def sign(self, rank: int) -> Path:
        """The run need not go on for this newcomer any more."""
        return Path(self.folder, f"over{rank}")


@dataclass(frozen=True)
class Grown:
    """What a rank that lives has at the end of such a run."""

    state: dict[str, torch.Tensor]
    copy: dict[str, torch.Tensor]
    rate: float
    progress: float
    epochs: int
    place: int
    world_size: int


def is_on_the_way_in(place: str, act: Callable[[], None]) -> bool:
    """Whether newcomers or their givers pass there; `act` is called then."""
    if place == "handing":
        before(CheckpointKeeper, "hand_over", act)
    elif place == "handed":
        after(CheckpointKeeper, "hand_over", act)
    elif place == "ready":
        visit_events(JoinReady, act, is_before=False)
    elif place == "opening":
        visit_events(EpochOpened, act, is_before=True)
    else:
        return False
    return True
