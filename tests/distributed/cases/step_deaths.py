"""Steps of ``sync`` in which ranks die, and the same run in one process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import elche
from elche.comm.gradients.buckets import bucket
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.transport import exchange
from elche.comm.transport.host_exchange import HostExchange
from elche.coordination.protocol.instructions import (
    EndEpoch,
    GrantBatches,
    LeaveOut,
    Regroup,
)
from elche.runtime.process.worker import Worker
from elche.runtime.sync.step_groups import StepGroups
from tests.distributed.cases.counting import Indices, log_batch, rows_of
from tests.distributed.cases.deaths import Death, Visits, before, die, plan_death
from tests.distributed.cases.late_sums import lack_sums, replace
from tests.distributed.cases.tasks import state_of

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
        early: the next batch is asked for before the backward pass of the last one.
        loss: over a batch, "mean", "sum" or "weighted".
        optimizers: that share the parameters.
        scaler: losses are scaled, by more and more.
        late_buffer: the forward pass from which on a second buffer is written, from 1.
        workers: of the loader.
        clip: the norm to which gradients are clipped in place.
        step_s: seconds of a step beside.
        saves_at: a checkpoint is asked for in this step of the first epoch.
        together: the rank that reads that a pause has begun only with a death in it.
        parts: ranks sum parts of every message, small ones too.
        leaves: the loop leaves the epoch after the step that noticed a death.
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
    early: bool = False
    loss: str = "mean"
    optimizers: int = 1
    scaler: bool = False
    late_buffer: int = 1000
    workers: int = 0
    clip: float = 0.0
    step_s: float = 0.0
    saves_at: int = -1
    together: int = -1
    parts: bool = False
    leaves: bool = False


@dataclass(frozen=True)
class Trained:
    """What a rank that lives has at the end."""

    state: dict[str, torch.Tensor]
    progress: float
    place: int
    world_size: int
    norm: float | None
    by_hosts: bool
    samples: list[int]


class Net(nn.Module):
    """Some layers, the count of their steps, and buffers that none reads.

    Args:
        late: the forward pass from which on the second one is written.
    """

    def __init__(self, late: int) -> None:
        super().__init__()
        self._forwards, self._late = 0, late
        self.late_trace: torch.Tensor
        self.register_buffer("late_trace", torch.zeros(3))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
        self.trace: torch.Tensor
        self.register_buffer("trace", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trace += x.detach().mean(0)
        self._forwards += 1
        if self._forwards >= self._late:
            self.late_trace += x.detach().mean(0)
        made: torch.Tensor = self.layers(x)
        return made


def make(loop: Loop) -> tuple[Net, list[torch.optim.Optimizer]]:
    """The model that all begin with, and its optimizers."""
    torch.manual_seed(5)
    model = Net(loop.late_buffer).double()
    parameters = [*model.parameters()]
    parts = [parameters[at :: loop.optimizers] for at in range(loop.optimizers)]
    return model, [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]


def inputs_of(index: torch.Tensor) -> torch.Tensor:
    """What the model is given."""
    at = index.double().unsqueeze(1)
    return torch.cat([torch.sin(at), torch.cos(1.7 * at), at / 96], 1)


def weight_of(index: torch.Tensor) -> torch.Tensor:
    """Of each sample."""
    return index % 3 + 1.0


def loss_of(model: nn.Module, index: torch.Tensor, kind: str = "mean") -> torch.Tensor:
    """Of samples, each of which moves it in its own way."""
    at = index.double().unsqueeze(1)
    y = torch.cat([torch.sin(0.3 * at), at.remainder(5) / 5], 1)
    losses = (model(inputs_of(index)) - y).square().sum(1)
    if kind == "sum":
        return losses.sum() / BATCH
    weights = weight_of(index) if kind == "weighted" else torch.ones(len(index))
    return (weights * losses).sum() / weights.sum()


def options_of(loop: Loop) -> dict[str, Any]:
    """Of `elche.setup`."""
    options: dict[str, Any] = {
        "leave_out": False,
        "transport": {"bucket_cap_mb": CAP_MB},
    }
    if loop.loss == "sum":
        options["loss_reduction"] = "sum"
    if loop.loss == "weighted":
        options["weight_of"] = lambda index: weight_of(index).sum()
    return {**options, **dict(loop.options)}


def train(loop: Loop) -> Trained:
    """Trains, dies where planned, and says what it has at the end."""
    rank = int(os.environ["RANK"])
    bucket.SMALL_ELEMENTS = 0  # so that gradients of a small model are dropped too
    if loop.parts:
        exchange.LEAST_BYTES = 0
    model: Any
    model, optimizers = make(loop)
    visits: Visits = {}
    for death in loop.deaths:
        if death.rank == rank and death.place == "apart":
            die_left_out(death, Path(loop.folder, "log0.txt"))
        elif death.rank == rank:
            plan(death, visits, model)
    data = Indices(loop.samples, lambda: visits.get("load", int)())
    loader: Any = DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=loop.workers
    )
    model, optimizers, loader = elche.setup(
        model, optimizers, loader, policy="sync", **options_of(loop)
    )
    by_hosts: list[bool] = []
    before(HostExchange, "begin", lambda: by_hosts.append(True))
    if rank == loop.late:
        lack_sums(loop.late_at)
    if rank == loop.together:
        read_together()
    scaler = torch.amp.GradScaler(
        "cpu", enabled=loop.scaler, init_scale=64.0, growth_interval=3
    )

    def note(epoch: int, number: int, index: torch.Tensor) -> None:
        at = int(model.count) if dict(loop.options).get("leave_out") else number
        log_batch(loop.folder, epoch, at, index)

    world_size, samples = elche.world_size(), list[int]()
    for epoch in range(loop.epochs):
        for number, batch in enumerate(batches_of(loader, partial(note, epoch))):
            visits.get("forward", int)()
            time.sleep(loop.step_s)
            for passed in range(loop.passes):
                loss = loss_of(model, batch.now, loop.loss)
                if loop.early and not passed:
                    batch.fetch()
                    visits.get("fetched", int)()
                scaler.scale(loss).backward()
                visits.get("passed", int)()
            visits.get("step", int)()
            if (epoch, number) == (0, loop.saves_at):
                elche.save(Path(loop.folder, "checkpoints"))
            if (number + 1) % loop.accumulate == 0:
                take_step(model, optimizers, loop.clip, scaler)
            if loop.leaves and elche.world_size() < world_size:
                world_size = elche.world_size()
                del batch  # it holds the loader's iterator
                break
        samples.append(elche.epoch_metrics().samples)
        visits.get("between", int)()
        elche.barrier()
    trained = Trained(
        state_of(model),
        elche.progress_samples(),
        elche.rank(),
        elche.world_size(),
        elche.epoch_metrics().parameter_norm,
        bool(by_hosts),
        samples,
    )
    elche.shutdown()
    return trained


@dataclass(frozen=True)
class Handed:
    """A batch that a loop was given.

    Attributes:
        now: its samples.
        fetch: asks for the next one, before that is due.
    """

    now: torch.Tensor
    fetch: Callable[[], None]


def batches_of(
    loader: Any, note: Callable[[int, torch.Tensor], None]
) -> Iterator[Handed]:
    """Of an epoch, which the loop may ask for ahead; noted as they are given."""
    batches, fetched = enumerate(loader), deque[torch.Tensor | None]()

    def fetch() -> None:
        number, index = next(batches, (0, None))
        fetched.append(index)
        if index is not None:
            note(number, index)

    while True:
        if not fetched:
            fetch()
        now = fetched.popleft()
        if now is None:
            return
        yield Handed(now, fetch)


def take_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    clip: float,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """With gradients clipped in place, where a norm is given."""
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    model.get_buffer("count").add_(1)


def plan(
    death: Death, visits: Visits, model: nn.Module, act: Callable[[], object] = die
) -> None:
    """As `plan_death`, also in a layer's backward and while ranks are left out."""
    if death.place == "without":
        visits["step"] = left_out_for(int(death.at), act)
    elif death.place == "without, closing":
        before(GradientReducer, "close_pass", left_out_for(int(death.at), act))
    elif death.place == "backward":  # the last layer's bucket is sent by then
        plan_death(death, visits, act)
        next(model.parameters()).register_hook(visits[death.place])
    else:
        plan_death(death, visits, act)


def read_together() -> None:
    """Reads the end of an epoch that was cut when a death in the pause is in line."""

    def receive(
        original: Callable[..., None], worker: Worker, handle: Any, waiting_for: str
    ) -> None:
        channel = worker._channel
        is_grant = waiting_for.startswith("the grant of step") and not worker.dead
        if is_grant:
            channel.await_kinds((GrantBatches, EndEpoch), 30.0)
        if not is_grant or not channel.waiting(EndEpoch):
            original(worker, handle, waiting_for)
            return
        channel.await_kinds((Regroup,), 30.0)
        assert channel.waiting(Regroup), "nobody has died"
        # Both are read where the loader draws, before it is asked whether either came.

    replace(Worker, "receive", receive)


def die_left_out(death: Death, log: Path) -> None:
    """Dies when it has been left out of so many steps, which another rank logs."""
    is_back = threading.Event()

    def steps() -> int:
        return log.read_text().count("\n")

    def watch(is_back: threading.Event, most: float) -> None:
        while not is_back.wait(0.005):
            if steps() >= most:
                die()

    def leave_out(original: Any, members: StepGroups, told: LeaveOut) -> Any:
        nonlocal is_back
        is_back.set()
        if death.rank in told.left_out and told.epoch:  # the first one may be short
            is_back = threading.Event()
            args = is_back, steps() + death.at
            threading.Thread(target=watch, args=args, daemon=True).start()
        return original(members, told)

    replace(StepGroups, "exclude", leave_out)


def left_out_for(steps: int, act: Callable[[], object]) -> Callable[[], None]:
    """To be called in each step: acts when others were left out for so many."""
    since = -(10**6)

    def leave_out(original: Any, members: StepGroups, told: LeaveOut) -> Any:
        nonlocal since
        since = 0 if told.left_out else -(10**6)
        return original(members, told)

    def visit() -> None:
        nonlocal since
        since += 1
        if since == steps:
            act()

    replace(StepGroups, "exclude", leave_out)
    return visit


def steps_of(
    folder: str | Path, ranks: int, victims: Sequence[int], epochs: int
) -> list[list[list[list[int]]]]:
    """Per epoch the batches of each step, those of ranks that live first.

    A dead rank's batch counts in its step, unless its samples were given out again.

    Args:
        folder: of the logs, in which each batch has the place of its step.
        ranks: that were there.
        victims: ranks that died, the first one first.
        epochs: of the run.
    """
    found: list[dict[int, list[list[int]]]] = [{} for _ in range(epochs)]
    living = [rank for rank in range(ranks) if rank not in victims]
    for rank in (*living, *reversed(victims)):
        for epoch, at, batch in rows_of(folder, rank):
            steps = found[epoch]
            given = {i for parts in steps.values() for part in parts for i in part}
            if rank in victims and given & {*batch}:
                assert given >= {*batch}
            else:
                steps.setdefault(at, []).extend([batch] if batch else [])
    return [[steps[at] for at in sorted(steps)] for steps in found]


def reference(
    loop: Loop, epochs: list[list[list[list[int]]]], apart: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """The same steps in one process; see `steps_alone`."""
    model, optimizers = make(loop)
    deque(steps_alone(loop, model, optimizers, epochs, apart), maxlen=0)
    return model.state_dict() | traces(loop, epochs)


def steps_alone(
    loop: Loop,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    epochs: list[list[list[list[int]]]],
    apart: Sequence[int] = (),
) -> Iterator[None]:
    """Takes steps in one process, and yields after each.

    Args:
        loop: what ranks did.
        model: of this process.
        optimizers: of it.
        epochs: of each step the batches.
        apart: samples that are only in the first backward pass of their step.
    """
    for steps in epochs:
        for number, parts in enumerate(steps):
            step = [*chain.from_iterable(parts)]
            for _ in range(loop.passes if step else 0):
                loss_of(model, torch.tensor(step), loop.loss).backward()
                step = [index for index in step if index not in apart]
            if (number + 1) % loop.accumulate == 0:
                take_step(model, optimizers, loop.clip)
            yield


def traces(loop: Loop, epochs: list[list[list[list[int]]]]) -> dict[str, torch.Tensor]:
    """Both buffers: of each step the mean over the ranks that have samples."""
    found = {name: torch.zeros(3).double() for name in ("trace", "late_trace")}
    for number, parts in enumerate(chain.from_iterable(epochs), 1):
        inputs = [inputs_of(torch.tensor(part)).mean(0) for part in parts]
        if not inputs:
            continue
        mean = torch.stack(inputs).mean(0)
        found["trace"] += mean
        if number >= loop.late_buffer:
            found["late_trace"] += mean
    return found
