"""Ranks that die at a named place of a run, and the account of what the others hold.

Each sample is counted three times: by what loops were handed (a file, which outlives
its rank), by a counter in the model, which travels with every commit, and by elche.
"""

from __future__ import annotations

import collections
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.checkpoint import writer
from elche.comm.averaging.averaging import Averager
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.codec.coded_hops import CodedHops
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.transport.process_group import Group
from elche.coordination.liveness import BEAT_S, QUIET_S
from elche.coordination.protocol.events import (
    BarrierReached,
    EpochOpened,
    WindowClosed,
    WindowReduced,
)
from elche.coordination.windows.window_loop import WindowLoop
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.epochs.epoch_opening import EpochOpening
from elche.runtime.process import heartbeat
from elche.runtime.process.worker import Worker
from elche.runtime.user_collectives import UserCollectives
from elche.runtime.watch import model_copies
from elche.runtime.windows import gradient_sync
from elche.runtime.windows.gradient_sync import GradientSync
from elche.runtime.windows.regrouping import Regrouping
from tests.distributed.cases.late_sums import LateSum, await_sums, mark_third_sum
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.tasks import state_of

EVENTS = {
    "closed": WindowClosed,
    "reduced": WindowReduced,
    "opened": EpochOpened,
    "barrier": BarrierReached,
}


@dataclass(frozen=True)
class Death:
    """A rank that dies.

    Attributes:
        rank: which.
        place: where; see `plan_death`.
        at: the how manyth time that it comes there, from 1 on; seconds for "time".
        holders: it waits there until these ranks have the third sum.
    """

    rank: int
    place: str
    at: float = 3
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Counted:
    """What a rank that lives has at the end."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    progress: float = 0.0
    place: int = 0
    world_size: int = 0
    handed: int = 0
    found: list[Any] = field(default_factory=list)
    commits: list[torch.Tensor] = field(default_factory=list)
    """Momentum after each common step or mean, where ranks have one in common."""


class Indices(Dataset[int]):
    """Samples that are their own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Counter(nn.Module):
    """Counts in a buffer how often each sample was trained on; a BatchNorm beside."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(samples))
        self.norm = nn.BatchNorm1d(2)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(samples, dtype=torch.int64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.count += torch.bincount(index, minlength=len(self.count))
        noise = self.norm(torch.randn(len(index) + 1, 2))
        return self.w[index].sum() + 0.0 * noise.sum()


def count(
    folder: str,
    deaths: tuple[Death, ...],
    samples: int,
    epochs: int,
    options: dict[str, Any],
    step_s: float = 0.001,
    late: tuple[int, str] = (-1, ""),
    meeting: str = "barrier",
    slow: tuple[int, Callable[[float], float], float] = (-1, float, 0.0),
    quiet_s: float = QUIET_S,
    beat_s: float = BEAT_S,
    momentum: float = 0.0,
    windows: dict[str, Any] | None = None,
    freezes: bool = False,
) -> Counted:
    """Trains, dies where planned, and says what it has at the end."""
    rank = int(os.environ["RANK"])
    heartbeat.QUIET_S, heartbeat.BEAT_S = quiet_s, beat_s
    torch.manual_seed(5)
    counter = Counter(samples)
    own = torch.optim.SGD(counter.parameters(), lr=1.0, momentum=momentum)
    copies = [Counter(samples)] if meeting == "copies" else []
    loader: Any = DataLoader(Indices(samples), batch_size=16, shuffle=True)
    model, optimizer, loader = elche.setup(
        counter,
        own,
        loader,
        windows=elche.WindowConfig(
            local_batch_size=4,
            max_anchor=4 if late[1] else 200,  # a late sum is no epoch's last one
            **(windows or {"outer": elche.config.OuterConfig(optimizer="average")}),
        ),
        copies=copies,
        **options,
    )
    commits: list[torch.Tensor] = []
    if windows is not None:
        note_commits(own, commits)
    late_sum = LateSum(folder, rank, late[1]) if rank == late[0] else None
    mark_third_sum(folder, rank)
    meet = Meeting(meeting, folder, rank)
    hits = {d.place: plan_death(d, folder, meet) for d in deaths if d.rank == rank}
    hits.get("setup", int)()
    if meeting == "resume":
        meet()
    with Path(folder, f"log{rank}.txt").open("w") as log:
        for epoch in range(epochs):
            for index in loader:
                log.write(f"{epoch} {' '.join(map(str, index.tolist()))}\n")
                log.flush()
                model(index).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(step_s)
                hits.get("batch", int)()
                if rank == slow[0] and not meet.found:
                    meet.found.append(slow[1](slow[2]))
                if late_sum is not None:
                    late_sum.stay()
            hits.get("between", int)()
            meet()
            counter.norm.requires_grad_(not freezes)
    if late_sum is not None:
        late_sum.check()
    held = state_of(model)
    if windows is not None:  # ranks hold it in common
        held["momentum"] = own.state[counter.w]["momentum_buffer"]
    counted = Counted(
        held,
        elche.progress_samples(),
        elche.rank(),
        elche.world_size(),
        0 if late_sum is None else late_sum.handed,
        meet.found,
        commits,
    )
    elche.shutdown()
    return counted


def note_commits(optimizer: torch.optim.Optimizer, commits: list[torch.Tensor]) -> None:
    """Keeps what its momentum is whenever all ranks hold the same."""
    first = optimizer.param_groups[0]["params"][0]

    def note() -> None:
        commits.append(optimizer.state[first]["momentum_buffer"].clone())

    after(GradientSync, "finish", note)
    after(GradientWindow, "skip", note)


def handed(folder: Path) -> collections.Counter[tuple[int, int]]:
    """How often loops were handed each position, by their logs: epoch and indices."""
    rows = [
        [*map(int, line.split())]
        for path in folder.glob("log*.txt")
        for line in path.read_text().splitlines()
    ]
    return collections.Counter((epoch, i) for epoch, *own in rows for i in own)


def die() -> None:
    """As the kernel ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def pause(duration_s: float) -> float:
    """Stops this process for a while; returns for how long."""
    began_s, me = time.monotonic(), os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {duration_s}; kill -CONT {me}"]):
        os.kill(me, signal.SIGSTOP)
    return time.monotonic() - began_s


def evaluate_long(duration_s: float) -> float:
    """User code that is at no batch for a while."""
    time.sleep(duration_s)
    return duration_s


def hold_the_gil(duration_s: float) -> float:
    """One call into C code, in which no thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(int(duration_s * 1e6))
    return duration_s


def plan_death(death: Death, folder: str, meet: Meeting) -> Callable[[], object]:
    """Dies there; for places in the loop returns what is to be called there."""
    visits = 0

    def visit() -> None:
        nonlocal visits
        visits += 1
        if visits == death.at:
            await_sums(folder, death.holders)
            die()

    if death.place in ("time", "stopped"):
        number = signal.SIGKILL if death.place == "time" else signal.SIGSTOP
        timer = threading.Timer(death.at, os.kill, (os.getpid(), number))
        # From when the first epoch has begun, before which none may die.
        after(EpochOpening, "open", lambda: None if timer.ident else timer.start())
    elif death.place == "keys":
        before(SampleOrder, "share", visit)
    elif death.place == "after keys":
        after(SampleOrder, "share", visit)
    elif death.place == "before sending":
        before(ParameterGroup, "begin", visit)
    elif death.place == "before sending, late":  # the others have begun
        WindowLoop.begins_at_close = property(lambda _: False)  # type: ignore[assignment, method-assign]
        before(ParameterGroup, "begin", visit)
    elif death.place == "after sending":
        after(ParameterGroup, "begin", visit)
    elif death.place == "sending a part":
        before(CodedHops, "_send", visit)
    elif death.place == "after summing":
        after(Averager, "_wait", visit)
    elif death.place == "before begun":
        before(GradientWindow, "begin", visit)
    elif death.place == "before finishing":
        before(GradientWindow, "finish", visit)
    elif death.place == "after finishing":
        after(GradientWindow, "finish", visit)
    elif death.place == "handing over":
        before(gradient_sync, "take_step", visit)
    elif death.place == "evaluating":
        meet.at_step = visit
    elif death.place == "meeting":
        before(Group, "all_reduce", lambda: visit() if meet.is_under_way else None)
    elif death.place == "agreed":
        after(UserCollectives, "barrier", visit)
    elif death.place == "sharing copies":
        before(model_copies, "_average", visit)
    elif death.place == "writing":
        before(writer, "_write_part", visit)
    elif death.place == "regrouping":
        before(Regrouping, "meet", visit)
    elif death.place == "regrouped":
        after(Worker, "regroup", visit)
    elif death.place == "reconnecting":
        before(WindowBuffers, "join_own", visit)
    elif " " in death.place:
        when, _, name = death.place.partition(" ")
        visit_events(EVENTS[name], visit, is_before=when == "before")
    return visit


def before(owner: Any, name: str, visit: Callable[[], None]) -> None:
    """Visits before each call."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        visit()
        return original(*args, **named)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, visit: Callable[[], None]) -> None:
    """Visits after each call."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        visit()
        return result

    setattr(owner, name, wrapped)


def visit_events(kind: type, visit: Callable[[], None], *, is_before: bool) -> None:
    """Visits where this rank sends events of a kind."""
    original = Worker.send

    def send(worker: Worker, *events: Any) -> None:
        is_there = any(isinstance(event, kind) for event in events)
        if is_there and is_before:
            visit()
        original(worker, *events)
        if is_there and not is_before:
            visit()

    Worker.send = send  # type: ignore[method-assign]
