"""Ranks that join a run under way, and what all hold at its end."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elche
from elche.checkpoint.keeper import CheckpointKeeper
from elche.session.process import current_run, failing_together
from tests.distributed.cases import step_deaths
from tests.distributed.cases.counting import Indices, log_batch, made
from tests.distributed.cases.deaths import Death, Visits, after, die
from tests.distributed.cases.step_deaths import Loop, batches_of, loss_of
from tests.distributed.cases.tasks import state_of
from tests.harness.waiting import until

MOST_EPOCHS = 200
WINDOWS: dict[str, dict[str, Any]] = {
    "cadence": {"local_batch_size": 4, "outer": {"optimizer": "slowmo"}},
    "async": {"local_batch_size": 4, "outer": {"optimizer": "slowmo"}},
    "auto": {"outer": {"optimizer": "average"}},
}


@dataclass(frozen=True, kw_only=True)
class Growing:
    """A run that goes on until all newcomers have trained, or are gone.

    Attributes:
        folder: of logs, signs and checkpoints.
        policy: of the run.
        founders: ranks that it begins with.
        joiners: ranks that join it.
        deaths: of any of them.
        called_at: most ranks that live when the joiners are called; 0: the founders.
        called_after: batches of a rank before that.
        called_in: the policy that runs then; "" for any.
        options: of `elche.setup`.
        samples: of an epoch.
        batch: samples of a global batch.
        step_s: seconds of a step beside; of rank 1 ``slow`` times as many.
        slow: see ``step_s``.
        enough: batches that a newcomer trains on before the run may end.
        saves: a checkpoint is made in each epoch.
        raises: the first joiner's script fails once it holds the state.
        other: what is another in the joiners' scripts: "lr", "model" or "loop".
        loss: under ``sync``, over a batch: "mean", "sum" or "weighted".
        accumulate: batches to an optimizer step.
        early: the next batch is asked for before the backward pass of the last one.
        freezes: the founders train fewer parameters from the second epoch on.
    """

    folder: str
    policy: str = "sync"
    founders: int = 2
    joiners: int = 1
    deaths: tuple[Death, ...] = ()
    called_at: int = 0
    called_after: int = 3
    called_in: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    samples: int = 640
    batch: int = 16
    step_s: float = 0.002
    slow: float = 1.0
    enough: int = 5
    saves: bool = False
    raises: bool = False
    other: str = ""
    loss: str = "mean"
    accumulate: int = 1
    early: bool = False
    freezes: bool = False

    @property
    def newcomers(self) -> range:
        """Their ranks."""
        return range(self.founders, self.founders + self.joiners)

    @property
    def loop(self) -> Loop:
        """Of ``sync``, whose steps are compared with one process."""
        return Loop(folder=self.folder, loss=self.loss)

    def sign(self, rank: int) -> Path:
        """The run need not go on for this newcomer any more."""
        return Path(self.folder, f"over{rank}")


@dataclass(frozen=True)
class Grown:
    """What a rank that lives has at the end.

    With the copy that is its EMA, the samples of the last epoch (``metrics``), and
    digests of optimizer and model at each hand-over (``handed``).
    """

    state: dict[str, torch.Tensor]
    copy: dict[str, torch.Tensor]
    rate: float
    progress: float
    epochs: int
    place: int
    world_size: int
    metrics: int
    policies: list[str]
    batches: int
    handed: list[str]


def model_of(
    growth: Growing, other: str = ""
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What ranks train: under ``sync`` layers, else a model that counts."""
    if growth.policy == "sync":
        model, [optimizer] = step_deaths.make(growth.loop)
        return model, optimizer
    torch.manual_seed(5)
    rate = 0.5 if other == "lr" else 1.0
    return made(
        growth.policy, growth.samples + (other == "model"), lr=rate, momentum=0.1
    )


def followers_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.optim.lr_scheduler.LRScheduler, AveragedModel]:
    """What moves along with each step."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.97)
    return schedule, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def options_of(growth: Growing) -> dict[str, Any]:
    """Of `elche.setup`."""
    options: dict[str, Any] = {"timeout_s": 60.0, "policy": growth.policy}
    if growth.policy == "sync":
        options |= step_deaths.options_of(growth.loop)
    else:
        given = dict(WINDOWS[growth.policy])
        given["outer"] = elche.config.OuterConfig(**given["outer"])
        options["windows"] = elche.WindowConfig(**given)
    if growth.policy == "auto":
        options["leave_out"] = False
    return options | dict(growth.options)


def grow(growth: Growing) -> Grown:
    """Trains until all newcomers have, or are gone."""
    rank = int(os.environ["RANK"])
    with failing_together():
        try:
            return _grow(growth, rank)
        except Exception as error:  # which may be killed before it can say so
            growth.sign(rank).write_text(str(error))
            raise


def _grow(growth: Growing, rank: int) -> Grown:
    is_joiner, called = rank in growth.newcomers, Path(growth.folder, "come")
    model: Any
    model, optimizer = model_of(growth, growth.other if is_joiner else "")
    if is_joiner:
        until(called.exists)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # none of it may come into the run
    visits = plan_faults(growth, rank, model)
    schedule, copy = followers_of(model, optimizer)
    handed = watch_hand_overs(model, optimizer)
    data = Indices(growth.samples, lambda: visits.get("load", int)())
    loader: Any = DataLoader(data, batch_size=growth.batch, shuffle=True)
    model, optimizer, loader = elche.setup(
        *(model, optimizer, loader),
        schedulers=[schedule],
        copies=[copy],
        **options_of(growth),
    )
    run, policies, batches, epochs = current_run(), list[str](), 0, 0
    assert run is not None

    def note(epoch: int, number: int, index: torch.Tensor) -> None:
        log_batch(growth.folder, epoch, elche.progress_samples(), index)

    is_apart = is_joiner and growth.other == "loop"
    for epoch in range(3) if is_apart else elche.epochs(MOST_EPOCHS):
        if growth.freezes and epoch == 1 and not is_joiner:
            next(model.parameters()).requires_grad_(False)
        for number, batch in enumerate(batches_of(loader, partial(note, epoch))):
            if policies[-1:] != [run.policy]:
                policies.append(run.policy)
            visits.get("forward", int)()
            time.sleep(growth.step_s * (growth.slow if rank == 1 else 1.0))
            if growth.policy == "sync":
                loss = loss_of(model, batch.now, growth.loss)
            else:
                loss = model(batch.now)
            if growth.early:
                batch.fetch()
            loss.backward()
            visits.get("step", int)()
            if (number + 1) % growth.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                model.count += growth.policy == "sync"  # steps; else it counts itself
            schedule.step()
            copy.update_parameters(model)
            visits.get("batch", int)()
            batches += 1
            if growth.saves and number == 12:
                elche.save(Path(growth.folder, "checkpoints"))
            if is_joiner and batches == growth.enough:
                growth.sign(rank).touch()
            is_time = elche.world_size() <= (growth.called_at or growth.founders)
            is_time &= growth.called_in in ("", run.policy)
            is_time &= batches >= growth.called_after and growth.freezes <= epoch
            if is_time and not is_joiner:
                called.touch()
        epochs = epoch + 1
        visits.get("between", int)()
        if not elche.any(not all(growth.sign(r).exists() for r in growth.newcomers)):
            break
    grown = Grown(
        state_of(model),
        state_of(copy),
        schedule.get_last_lr()[0],
        elche.progress_samples(),
        epochs,
        elche.rank(),
        elche.world_size(),
        elche.epoch_metrics().samples,
        policies,
        batches,
        handed,
    )
    elche.shutdown()
    return grown


def plan_faults(growth: Growing, rank: int, model: nn.Module) -> Visits:
    """Where a rank dies, or fails; returns what its loop calls at its own places."""
    visits: Visits = {}

    def die_for_good() -> None:
        growth.sign(rank).touch()
        die()

    for death in growth.deaths:
        if death.rank == rank:
            step_deaths.plan(death, visits, model, die_for_good)
    if growth.raises and rank == growth.founders:
        after(CheckpointKeeper, "send_state", raise_error)
    return visits


def raise_error() -> None:
    raise ValueError("a fault in the joiner's script")


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

    after(CheckpointKeeper, "send_state", note)
    return handed


def alone(
    growth: Growing, epochs: list[list[list[list[int]]]]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """The same steps in one process: model, its average, and the last rate."""
    model, optimizer = model_of(growth)
    schedule, copy = followers_of(model, optimizer)
    for _ in step_deaths.steps_alone(growth.loop, model, [optimizer], epochs):
        schedule.step()
        copy.update_parameters(model)
    return model.state_dict(), copy.state_dict(), schedule.get_last_lr()[0]
