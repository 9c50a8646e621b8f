"""A loop that saves inside its epochs, is resumed, and says which samples it saw."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import elche
from elche.checkpoint.store import CheckpointStore
from elche.session.process import failing_together
from tests.distributed.cases.tasks import Task, begin, build, state_of, take_step
from tests.harness.settings import nested


class Seen:
    """Samples that a rank trained on, of each epoch: a counter of the user's."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.draws: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": list(self.pairs), "draws": list(self.draws)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pairs = [(epoch, index) for epoch, index in state["pairs"]]
        self.draws = list(state["draws"])


@dataclass
class Trained:
    """What a rank saw and holds: (epoch, sample), those before a resume included.

    With random numbers that came with the samples, the epochs that its loop was in, the
    rate at each epoch's end, and the samples of the last epoch (``metrics``).
    """

    pairs: list[tuple[int, int]]
    draws: list[float]
    epochs: list[int] = field(default_factory=list)
    progress: float = 0.0
    rates: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: int = 0


def train(
    task: Task,
    folder: str,
    saves: tuple[int, ...] = (),
    resumes: bool | None = False,
    dropout: float = 0.0,
    *,
    saves_epochs: bool = False,
    early: bool = False,
) -> Trained:
    """Trains; rank 0 asks for a checkpoint after so many of its own batches.

    With ``saves_epochs`` there is one at every end of an epoch as well. An ``early``
    loop asks for the next batch before the backward pass of the last one.
    """
    model, optimizer, loader = build(task)
    model = torch.nn.Sequential(model[0], torch.nn.Dropout(dropout), *model[1:])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
    seen, epochs, rates, batches = Seen(), [], [], 0
    with failing_together():
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, schedulers=[scheduler], **nested(task.options)
        )
        elche.register_for_checkpointing(seen=seen)
        found = elche.resume(folder)
        assert resumes is None or found == resumes
        if resumes and elche.rank() >= _world_size(folder):
            seen = Seen()
        for epoch in elche.epochs(task.epochs):
            epochs.append(epoch)
            following = iter(loader)
            got, counts = next(following, None), elche.batch_weight()
            while got is not None:
                (x, y, index, draw), is_own = got, counts
                loss = F.cross_entropy(model(x), y)
                if early:
                    got, counts = next(following, None), elche.batch_weight()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if is_own:
                    seen.pairs += [(epoch, at) for at in index.tolist()]
                    seen.draws += draw.tolist()
                batches += 1
                if batches in saves:
                    elche.save(folder)
                if not early:
                    got, counts = next(following, None), elche.batch_weight()
            rates.append(scheduler.get_last_lr()[0])
            if saves_epochs:
                elche.save(folder)
        progress = elche.progress_steps()
        samples = sum(elche.epoch_metrics().rank_samples) if epochs else 0
    elche.shutdown()
    state = state_of(model)
    return Trained(seen.pairs, seen.draws, epochs, progress, rates, state, samples)


def train_until_killed(
    task: Task, folder: str, victim: int, delay_s: float, *, is_inside: bool
) -> Trained:
    """Trains with a checkpoint in every 0.2 s, or epoch; then a rank is killed.

    Any number of seconds from the beginning of all, setting up included.
    """
    if int(os.environ["RANK"]) == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    by_time = {"ELCHE_CHECKPOINT_DIR": folder, "ELCHE_CHECKPOINT_EVERY_S": "0.2"}
    by_time = by_time if is_inside else {}
    os.environ.update(by_time)
    try:
        return train(task, folder, resumes=None, saves_epochs=not is_inside)
    finally:
        for name in by_time:
            del os.environ[name]
        if int(os.environ["RANK"]) == victim:  # it was not in time
            os.kill(os.getpid(), signal.SIGKILL)


def _world_size(folder: str) -> int:
    found = CheckpointStore(Path(folder)).newest()
    assert found is not None
    return found.manifest.world_size


def breaks(
    task: Task, folder: str, rank: int, at: tuple[int, int]
) -> tuple[list[int], bool]:
    """Ranks ask for a checkpoint after a batch, one of them breaks off after one.

    Returns:
        Epochs, and whether this rank came to ask.
    """
    model, optimizer, loader = begin(task, **task.options)
    epochs, has_asked = [], False
    for epoch in elche.epochs(3):
        epochs.append(epoch)
        for batch, (x, y, _, _) in enumerate(loader, 1):
            take_step(model, optimizer, x, y)
            if batch == at[0] and epoch == 0:
                elche.save(folder)
                has_asked = True
            if batch == at[1] and epoch == 0 and elche.rank() == rank:
                break
    elche.shutdown()
    return epochs, has_asked
