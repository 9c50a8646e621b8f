"""Places of a run where a rank dies, or does something else, by their names."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from elche.checkpoint import writer
from elche.checkpoint.keeper import CheckpointKeeper
from elche.checkpoint.store import CheckpointStore
from elche.comm.averaging.averaging import Averager
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.codec.coded_hops import CodedHops
from elche.comm.gradients.buckets.bucket import Bucket
from elche.comm.gradients.buckets.bucket_pass import BucketPass
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.model_buffers.buffers import BufferAverager
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.transport import host_exchange
from elche.comm.transport.exchange import MemoryExchange, SharedExchange
from elche.comm.transport.host_exchange import HostExchange
from elche.coordination.protocol.events import (
    BarrierReached,
    EpochOpened,
    JoinReady,
    ModelUpdated,
    WindowClosed,
)
from elche.coordination.windows.window_loop import WindowLoop
from elche.runtime.data.sample_order import SampleOrder
from elche.runtime.epochs.epoch_opening import EpochOpening
from elche.runtime.epochs.run_epochs import RunEpochs
from elche.runtime.process.worker import Worker
from elche.runtime.sync.step_groups import StepGroups
from elche.runtime.user_collectives import UserCollectives
from elche.runtime.watch import model_copies
from elche.runtime.windows import gradient_sync
from elche.runtime.windows.regrouping import Regrouping
from elche.runtime.windows.synchroniser import Synchroniser

Visits: TypeAlias = dict[str, Callable[..., object]]
"""What a loop calls at places of its own, by their names."""


@dataclass(frozen=True)
class Death:
    """A rank that dies.

    Attributes:
        rank: which.
        place: of `PLACES`, "before" or "after" an event of `EVENTS`, or of the loop;
            "time" or "stopped" for seconds since the first epoch has begun.
        at: the how manyth time that it comes there, from 1 on; or seconds.
        holders: it waits there until these ranks have the third sum.
    """

    rank: int
    place: str
    at: float = 3
    holders: tuple[int, ...] = ()


def die() -> None:
    """As the kernel ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def visited(
    owner: Any, name: str, visit: Callable[[], object], *, is_before: bool
) -> None:
    """Visits before or after each call."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        if is_before:
            visit()
        result = original(*args, **named)
        if not is_before:
            visit()
        return result

    setattr(owner, name, wrapped)


before, after = partial(visited, is_before=True), partial(visited, is_before=False)


def visit_events(kind: type, visit: Callable[[], object], *, is_before: bool) -> None:
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


Place: TypeAlias = tuple[Callable[..., None], Any, str]
HOST_PLACES: dict[str, Place] = {
    "offering": (before, HostExchange, "begin"),
    "offered": (after, HostExchange, "begin"),
    "summing a host": (before, HostExchange, "begin_between"),
    "host summed": (after, HostExchange, "begin_between"),
    "handing on": (before, host_exchange, "succeeded"),
    "taken": (after, HostExchange, "release"),
}
"""Of a bucket that is summed inside hosts first; the middle three only on leaders."""
PART_PLACES: dict[str, Place] = {
    "before its contribution": (before, SharedExchange, "begin"),
    "after its contribution": (after, SharedExchange, "begin"),
    "before a part": (before, SharedExchange, "_sum_part"),
    "before its counter": (after, MemoryExchange, "_add"),
    "after a part": (after, SharedExchange, "_sum_part"),
    "after a sum": (after, SharedExchange, "release"),
}
"""Of a sum in shared memory of which each rank sums a part."""
BUILDING: dict[str, Place] = {
    "before building": (before, Synchroniser, "build"),
    "inside building": (before, KnownBuffers, "agree"),
    "after building": (after, Synchroniser, "build"),
    "after meeting": (after, EpochOpening, "build"),
}
"""Where ranks go over to steps or windows, in order."""
PLACES: dict[str, Place] = {
    **HOST_PLACES,
    **PART_PLACES,
    **BUILDING,
    "keys": (before, SampleOrder, "share"),
    "after keys": (after, SampleOrder, "share"),
    "pausing": (before, RunEpochs, "_compare"),
    "regrouping": (before, Regrouping, "meet"),
    "regrouped": (after, Worker, "regroup"),
    "reconnecting": (before, WindowBuffers, "join_own"),
    "first bucket": (after, Bucket, "send"),
    "last bucket": (before, GradientReducer, "close_pass"),
    "closed": (after, GradientReducer, "close_pass"),
    "_end_first": (before, BucketPass, "_end_first"),
    "_reorder": (before, BucketPass, "_reorder"),
    "ordered": (after, BucketPass, "_end_first"),
    "built": (before, Bucket, "open"),
    "taken over": (before, Bucket, "adopt_sums"),
    "buffers": (before, BufferAverager, "_reduce"),
    "formed": (after, StepGroups, "settle"),
    "beginning anew": (before, StepGroups, "rebuild_with_all"),
    "begun anew": (after, StepGroups, "rebuild_with_all"),
    "before sending": (before, ParameterGroup, "begin"),
    "before sending, late": (before, ParameterGroup, "begin"),
    "after sending": (after, ParameterGroup, "begin"),
    "sending a part": (before, CodedHops, "_send"),
    "after summing": (after, Averager, "_wait"),
    "before begun": (before, GradientWindow, "begin"),
    "before finishing": (before, GradientWindow, "finish"),
    "after finishing": (after, GradientWindow, "finish"),
    "handing over": (before, gradient_sync, "take_step"),
    "handing": (before, CheckpointKeeper, "send_state"),
    "handed": (after, CheckpointKeeper, "send_state"),
    "saving": (after, CheckpointStore, "begin"),
    "writing": (before, writer, "_write_part"),
    "agreed": (after, UserCollectives, "barrier"),
    "sharing copies": (before, model_copies, "average"),
}
EVENTS: dict[str, type] = {
    "closed": WindowClosed,
    "reduced": ModelUpdated,
    "opened": EpochOpened,
    "barrier": BarrierReached,
    "ready": JoinReady,
}


def plan_death(death: Death, visits: Visits, act: Callable[[], object] = die) -> None:
    """Acts at a place; for one of the loop this adds to `visits`."""
    if death.place in ("time", "stopped"):
        number = signal.SIGKILL if death.place == "time" else signal.SIGSTOP
        timer = threading.Timer(death.at, os.kill, (os.getpid(), number))
        # From when the first epoch has begun, before which none may die.
        after(EpochOpening, "open", lambda: None if timer.ident else timer.start())
        return
    numbers = itertools.count(1)

    def visit(*_: Any) -> None:
        if next(numbers) == death.at:
            act()

    when, _, event = death.place.partition(" ")
    if death.place in PLACES:
        around, owner, name = PLACES[death.place]
        around(owner, name, visit)
    elif event in EVENTS:
        visit_events(EVENTS[event], visit, is_before=when == "before")
    else:
        visits[death.place] = visit
    if death.place == "before sending, late":  # the others have begun
        WindowLoop.begins_at_close = property(lambda _: False)  # type: ignore[assignment, method-assign]
