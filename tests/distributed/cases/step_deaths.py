"""Steps of ``sync`` in which ranks die, and the same run in one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.checkpoint.keeper import CheckpointKeeper
from elche.comm.gradients.bucket_contract import Closed
from elche.comm.gradients.buckets import Bucket
from elche.comm.gradients.reducer import GradientReducer
from elche.coordination.protocol.instructions import (
    EndEpoch,
    GrantSteps,
    Instruction,
    Regroup,
)
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.process.worker import Worker
from elche.runtime.rank_settings import checksum
from elche.runtime.windows.step_regrouping import StepRegrouping
from tests.distributed.cases.survive_cases import Death, after, before, die

BATCH = 12
CAP_MB = 0.0002
"""Several buckets in a small model."""


@dataclass(frozen=True)
class Loop:
    """What a rank's loop does.

    Attributes:
        folder: of the logs.
        samples: of an epoch.
        epochs: of the run.
        deaths: in the order in which they come.
        options: of `elche.setup`.
        late: a rank without the sums of its ``late_at``-th pass, whoever has them.
        late_at: from 1 on.
        accumulate: batches to an optimizer step.
        passes: backward passes of a batch.
        workers: of the loader.
        clip: the norm to which gradients are clipped in place.
        step_s: seconds of a step beside.
        slow: the rank that takes them; -1: all.
        saves_at: a checkpoint is asked for in this step of the first epoch.
        together: the rank that reads that a pause has begun only with a death in it.
    """

    folder: str
    samples: int = 96
    epochs: int = 2
    deaths: tuple[Death, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    late: int = -1
    late_at: int = 3
    accumulate: int = 1
    passes: int = 1
    workers: int = 0
    clip: float = 0.0
    step_s: float = 0.0
    slow: int = -1
    saves_at: int = -1
    together: int = -1


@dataclass(frozen=True)
class Trained:
    """What a rank that lives has at the end."""

    state: dict[str, torch.Tensor]
    progress: float
    place: int
    world_size: int
    norm: float | None


class Indices(Dataset[int]):
    """Samples that are their own index."""

    def __init__(self, length: int, on_load: Callable[[], None]) -> None:
        self._length, self._on_load = length, on_load

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self._on_load()
        return index


class Net(nn.Module):
    """Some layers, and a buffer that each rank writes and none reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
        self.trace: torch.Tensor
        self.register_buffer("trace", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trace += x.detach().mean(0)
        made: torch.Tensor = self.layers(x)
        return made


def make() -> tuple[Net, torch.optim.Optimizer]:
    """The model that all begin with, and its optimizer."""
    torch.manual_seed(5)
    model = Net().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, index: torch.Tensor) -> torch.Tensor:
    """The mean over samples of a loss that each one moves in its own way."""
    at = index.double().unsqueeze(1)
    x = torch.cat([torch.sin(at), torch.cos(1.7 * at), at / 96], 1)
    y = torch.cat([torch.sin(0.3 * at), at.remainder(5) / 5], 1)
    return (model(x) - y).square().sum(1).mean()


def train(loop: Loop) -> Trained:
    """Trains, dies where planned, and says what it has at the end."""
    rank = int(os.environ["RANK"])
    model, optimizer = make()
    at = {name: lambda: None for name in ("load", "forward", "step", "between")}
    for death in loop.deaths:
        if death.rank == rank:
            plan_death(death, at, model)
    data = Indices(loop.samples, lambda: at["load"]())
    loader: Any = DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=loop.workers
    )
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        loader,
        policy="sync",
        **{
            "leave_out": False,
            "transport": {"bucket_cap_mb": CAP_MB},
            **dict(loop.options),
        },
    )
    if rank == loop.late:
        lack_sums(loop.late_at)
    if rank == loop.together:
        read_together()
    with Path(loop.folder, f"log{rank}.txt").open("w") as log:
        for epoch in range(loop.epochs):
            for number, index in enumerate(loader):
                counts = index.tolist() if elche.batch_weight() else []
                log.write(f"{epoch} {' '.join(map(str, counts))}\n")
                log.flush()
                at["forward"]()
                time.sleep(loop.step_s * (loop.slow in (-1, rank)))
                for _ in range(loop.passes):
                    loss_of(model, index).backward()
                at["step"]()
                if (epoch, number) == (0, loop.saves_at):
                    elche.save(Path(loop.folder, "checkpoints"))
                if (number + 1) % loop.accumulate == 0:
                    take_step(model, optimizer, loop.clip)
            at["between"]()
            elche.barrier()
    trained = Trained(
        {name: value.clone() for name, value in model.state_dict().items()},
        elche.progress_samples(),
        elche.rank(),
        elche.world_size(),
        elche.epoch_metrics().parameter_norm,
    )
    elche.shutdown()
    return trained


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """With gradients clipped in place, where a norm is given."""
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def plan_death(
    death: Death,
    at: dict[str, Callable[[], None]],
    model: nn.Module,
    act: Callable[[], None] = die,
) -> None:
    """Dies at the how manyth visit of a place."""
    visits, when, place = 0, death.at, death.place

    def visit(*_: Any) -> None:
        nonlocal visits
        visits += 1
        if visits == when:
            act()

    if death.place == "time":  # from the second batch on
        act, when, place = threading.Timer(death.at, die).start, 2, "forward"
    elif death.place == "stopped":
        act, place = partial(os.kill, os.getpid(), signal.SIGSTOP), "forward"
    if place in at:
        at[place] = visit
    elif place == "backward":  # the last layer's bucket is sent by then
        next(model.parameters()).register_hook(visit)
    elif place == "first bucket":
        after(Bucket, "send", visit)
    elif place == "last bucket":
        before(GradientReducer, "close_pass", visit)
    elif place == "closed":
        after(GradientReducer, "close_pass", visit)
    elif place == "positions":
        before(SampleOrder, "share", visit)
    elif place == "pausing":
        before(CheckpointKeeper, "cut", visit)
    elif place == "forming":
        before(StepRegrouping, "form", visit)
    elif place == "formed":
        after(StepRegrouping, "form", visit)
    else:
        raise ValueError(death.place)


def read_together() -> None:
    """Reads the end of an epoch that was cut when a death in the pause is in line."""
    original = Worker.receive

    def receive(
        worker: Worker,
        handle: Callable[[Instruction], None],
        waiting_for: str,
        most_s: float | None = None,
    ) -> None:
        if not waiting_for.startswith("the grant of step"):
            original(worker, handle, waiting_for, most_s)
            return
        channel = worker._channel
        assert channel.await_kinds((GrantSteps, EndEpoch), 30.0)
        if not channel.waiting(EndEpoch):
            original(worker, handle, waiting_for, most_s)
            return
        assert channel.await_kinds((Regroup,), 30.0), "nobody has died"
        # Both are read where the loader draws, before it is asked whether either came.

    Worker.receive = receive  # type: ignore[method-assign]


def lack_sums(at: int) -> None:
    """This rank does not get what the others have, in one pass.

    As over gloo, where a rank's death leaves some with a sum and others without.
    """
    original = GradientReducer.close_pass
    passes = 0

    def close_pass(reducer: GradientReducer, side: int) -> Closed:
        nonlocal passes
        passes += 1
        before = [buffer.clone() for buffer in buffers_of(reducer)]
        closed = original(reducer, side)
        if passes == at:
            for buffer, value in zip(buffers_of(reducer), before, strict=True):
                buffer.copy_(value)
            reducer._group.wait_until(lambda: False, "a rank's death")
        return closed

    GradientReducer.close_pass = close_pass  # type: ignore[method-assign]


def buffers_of(reducer: GradientReducer) -> list[torch.Tensor]:
    """Of the model whose gradients it reduces."""
    averager = reducer._buffers
    assert averager is not None
    return list(averager._model.buffers())


def logs_of(folder: Path, rank: int, epochs: int) -> list[list[list[int]]]:
    """Per epoch the batches that a loop was given, without those that weigh nothing."""
    logs: list[list[list[int]]] = [[] for _ in range(epochs)]
    for line in Path(folder, f"log{rank}.txt").read_text().splitlines():
        epoch, *indices = map(int, line.split())
        logs[epoch].append(indices)
    return logs


def steps_of(
    logs: dict[int, list[list[list[int]]]], victims: Sequence[int]
) -> list[list[list[int]]]:
    """Per epoch the samples of each step.

    A dead rank's batch counts in its step, unless its samples were given out again.

    Args:
        logs: of each rank.
        victims: ranks that died, the first one first.
    """
    survivors = [rank for rank in logs if rank not in victims]
    epochs = []
    for epoch in range(len(logs[survivors[0]])):
        own = [logs[rank][epoch] for rank in survivors]
        assert len({len(batches) for batches in own}) == 1
        steps = [[*chain.from_iterable(parts)] for parts in zip(*own, strict=True)]
        given = {index for step in steps for index in step}
        for rank in reversed(victims):
            for number, batch in enumerate(logs[rank][epoch]):
                if not given & {*batch}:
                    steps[number] += batch
                    given |= {*batch}
                else:
                    assert given >= {*batch}
        epochs.append(steps)
    return epochs


def reference(loop: Loop, epochs: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """The same steps in one process."""
    model, optimizer = make()
    for steps in epochs:
        for number, step in enumerate(steps):
            if step:
                loss_of(model, torch.tensor(step)).backward()
            if (number + 1) % loop.accumulate == 0:
                take_step(model, optimizer, loop.clip)
    return model.state_dict()


def leave_after(loop: Loop) -> list[tuple[int, int, str]]:
    """Breaks off the epoch in which a rank has died, after the step that noticed.

    Returns:
        Of each epoch its samples, those that elche counts until then, and the model.
    """
    rank, found = int(os.environ["RANK"]), []
    model, optimizer = make()
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        DataLoader(Indices(loop.samples, lambda: None), BATCH, shuffle=True),
        policy="sync",
        timeout_s=60.0,
    )
    world_size = elche.world_size()
    for epoch in range(loop.epochs):
        for number, index in enumerate(loader):
            if (Death(rank, "forward", number) in loop.deaths) and not epoch:
                die()
            loss_of(model, index).backward()
            take_step(model, optimizer, 0.0)
            if elche.world_size() < world_size:
                world_size = elche.world_size()
                break
        samples = elche.epoch_metrics().samples
        found.append((samples, int(elche.progress_samples()), checksum(model)))
    elche.shutdown()
    return found
