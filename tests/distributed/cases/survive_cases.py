"""Ranks that die at a named place of a run, and what the others count of it."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import elche
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.transport.process_group import Group
from elche.coordination.liveness import BEAT_S, QUIET_S
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.process import heartbeat
from elche.runtime.windows.gradient_sync import GradientSync
from elche.session.process import current_run
from tests.distributed.cases.counting import Indices, log_batch, made
from tests.distributed.cases.deaths import Death, Visits, after, before, die, plan_death
from tests.distributed.cases.late_sums import LateSum, await_sums, mark_third_sum
from tests.distributed.cases.meetings import Meeting
from tests.distributed.cases.tasks import state_of


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run in which ranks die.

    Attributes:
        folder: of logs, signs and checkpoints.
        policy: of the run.
        deaths: of its ranks.
        samples: of an epoch.
        epochs: of the run.
        options: of `elche.setup`.
        windows: settings of windows beside the usual ones.
        drawn: how the order of samples is, see `loader_of`.
        momentum: of the optimizer, which ranks then hold in common.
        freezes: the second epoch trains fewer parameters.
        meeting: what ranks do together after each epoch.
        agrees: ranks agree after each epoch whether to save, as by `elche.epochs`.
        saves: ranks ask for a checkpoint inside each epoch; in the first one only
            rank 0 does.
        late: a rank without the third sum, and how it comes to that.
        late_order: a rank without the second epoch's order when the first rank dies.
        slow: a rank, what keeps it once, and the argument of that.
        step_s: seconds of a step beside.
        quiet_s: after which a rank that trains is asked where it is.
        beat_s: seconds between its heartbeats.
    """

    folder: str
    policy: str
    deaths: tuple[Death, ...] = ()
    samples: int = 640
    epochs: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, Any] = field(default_factory=dict)
    drawn: str = "global"
    momentum: float = 0.0
    freezes: bool = False
    meeting: str = "barrier"
    agrees: bool = False
    saves: bool = False
    late: tuple[int, str] = (-1, "")
    late_order: int = -1
    slow: tuple[int, Callable[[float], float], float] = (-1, float, 0.0)
    step_s: float = 0.001
    quiet_s: float = QUIET_S
    beat_s: float = BEAT_S


@dataclass(frozen=True)
class Counted:
    """What a rank that lives has at the end.

    With how often it was handed a sum that it lacked, what each meeting found, the
    momentum after each common step (``commits``), and the positions of each epoch.
    """

    state: dict[str, torch.Tensor]
    progress: float
    place: int
    world_size: int
    handed: int
    found: list[Any]
    commits: list[torch.Tensor]
    policies: list[str]
    orders: list[list[int]]


def options_of(trial: Trial) -> dict[str, Any]:
    """Of `elche.setup`."""
    average = elche.config.OuterConfig(optimizer="average")
    windows: dict[str, Any] = trial.windows or {"outer": average}
    if trial.policy != "auto":
        # A late sum is no epoch's last one.
        windows = {"max_anchor": 4 if trial.late[1] else 200, **windows}
        windows["local_batch_size"] = 4
    given = {"timeout_s": 60.0, **trial.options, "policy": trial.policy}
    if trial.policy == "sync":
        return given
    return {**given, "windows": elche.WindowConfig(**windows)}


def loader_of(drawn: str, samples: int) -> DataLoader[int]:
    """A loader whose order is drawn in one of the usual ways."""
    data = Indices(samples)
    own = torch.Generator().manual_seed(7)
    if drawn == "global":
        return DataLoader(data, batch_size=16, shuffle=True)
    if drawn == "own":
        return DataLoader(data, batch_size=16, shuffle=True, generator=own)
    if drawn == "batch sampler":
        batches = BatchSampler(SubsetRandomSampler(range(samples), own), 16, False)
        return DataLoader(data, batch_sampler=batches)
    weights = WeightedRandomSampler([1.0] * samples, samples, replacement=False)
    return DataLoader(data, batch_size=16, sampler=weights)


def orders_alone(drawn: str, samples: int, epochs: int) -> list[list[int]]:
    """The orders that a plain loop in one process sees."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        loader = loader_of(drawn, samples)
        return [[int(i) for batch in loader for i in batch] for _ in range(epochs)]


def train(trial: Trial) -> Counted:
    """Trains, dies where planned, and says what it has at the end."""
    rank, folder = int(os.environ["RANK"]), trial.folder
    heartbeat.QUIET_S, heartbeat.BEAT_S = trial.quiet_s, trial.beat_s
    torch.manual_seed(5)
    counter, own = made(trial.policy, trial.samples, momentum=trial.momentum)
    copies = [copy.deepcopy(counter)] if trial.meeting == "copies" else []
    loader: Any = loader_of(trial.drawn, trial.samples)
    model, optimizer, loader = elche.setup(
        *(counter, own, loader), copies=copies, **options_of(trial)
    )
    commits = note_commits(own) if trial.momentum else []
    late_sum = LateSum(folder, rank, trial.late[1]) if rank == trial.late[0] else None
    mark_third_sum(folder, rank)
    if rank == trial.late_order:
        lose_the_order()
    meet = Meeting(trial.meeting, folder, rank)
    visits = plan_deaths(trial, rank, meet)
    visits.get("setup", int)()
    if trial.meeting == "resume":
        meet()
    run, policies, orders = current_run(), list[str](), list[list[int]]()
    assert run is not None
    for epoch in (elche.epochs if trial.agrees else range)(trial.epochs):
        for number, index in enumerate(loader):
            log_batch(folder, epoch, number, index)
            if policies[-1:] != [run.policy]:
                policies.append(run.policy)
            # The next rank may come there when it is the first, as rank 0 has died.
            if trial.saves and number == 3 and (epoch or rank == 0):
                elche.save(Path(folder, f"epoch{epoch}"))
            loss = model(index)
            visits.get("forward", int)()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(trial.step_s)
            visits.get("batch", int)()
            if rank == trial.slow[0] and not meet.found:
                meet.found.append(trial.slow[1](trial.slow[2]))
            if late_sum is not None:
                late_sum.stay()
        visits.get("between", int)()
        keys: Any = run.epochs.opening.order.keys
        orders.append([int(key) for key in keys])
        meet()
        counter.norm.requires_grad_(not trial.freezes)
    if late_sum is not None:
        late_sum.check()
    held = state_of(model)
    if trial.momentum:
        held["momentum"] = own.state[counter.w]["momentum_buffer"]
    counted = Counted(
        held,
        elche.progress_samples(),
        elche.rank(),
        elche.world_size(),
        0 if late_sum is None else late_sum.handed,
        meet.found,
        commits,
        policies,
        orders,
    )
    elche.shutdown()
    assert elche.rank() == counted.place, "who is the main process stays so"
    return counted


def plan_deaths(trial: Trial, rank: int, meet: Meeting) -> Visits:
    """This rank's; returns what is to be called at places of the loop."""
    visits: Visits = {}
    for death in trial.deaths:
        if death.rank == rank:
            plan_death(death, visits, partial(_die_after, trial.folder, death.holders))
    meet.at_step = visits.get("evaluating")
    if "meeting" in visits:
        dies = visits["meeting"]
        before(Group, "all_reduce", lambda: dies() if meet.is_under_way else None)
    return visits


def _die_after(folder: str, holders: tuple[int, ...]) -> None:
    await_sums(folder, holders)
    die()


def note_commits(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Keeps what its momentum is whenever all ranks hold the same."""
    commits: list[torch.Tensor] = []
    first = optimizer.param_groups[0]["params"][0]

    def note() -> None:
        commits.append(optimizer.state[first]["momentum_buffer"].clone())

    after(GradientSync, "finish", note)
    after(GradientWindow, "skip", note)
    return commits


def lose_the_order() -> None:
    """In the second epoch this rank has no order when the one that drew it dies."""
    shares = 0
    original = SampleOrder.share

    def share(order: SampleOrder, group: Group, source: int = 0) -> None:
        nonlocal shares
        shares += 1
        original(order, group, source)
        if shares == 2:
            order.keys = None
            group.wait_until(lambda: False, "a rank's death")

    SampleOrder.share = share  # type: ignore[method-assign]


def pause(duration_s: float) -> float:
    """Stops this process for a while; returns for how long."""
    began_s, me = time.monotonic(), os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {duration_s}; kill -CONT {me}"]):
        os.kill(me, signal.SIGSTOP)
    return time.monotonic() - began_s


def hold_the_gil(duration_s: float) -> float:
    """One call into C code, in which no thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(int(duration_s * 1e6))
    return duration_s
