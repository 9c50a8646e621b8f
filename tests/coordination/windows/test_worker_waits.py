"""The real worker's epochs against a scripted shell: what they wait for, and when.

The simulated workers of this directory wait only when there is nothing to do; these
tests hold the real ones to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from elche.cadence.rank_time import RankTime
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import BatchesDone, Event, WindowClosed
from elche.coordination.protocol.instructions import (
    CloseWindow,
    GrantBatches,
    Instruction,
    OpenWindow,
)
from elche.coordination.windows.window_loop import WindowLoop
from elche.runtime.data.positions import EpochPositions
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.report.timeline import Timeline
from tests.coordination.windows.test_window_loop import opened
from tests.harness.epoch_hooks import hooks_without_run


class NeedlessWaitError(AssertionError):
    """The worker would sleep although there is work, or an order, at hand."""


class Shell:
    """Hands out a script of instructions; refuses to sleep when it is exhausted."""

    rank = 0
    group = None
    is_cold = False

    def __init__(self) -> None:
        self.inbox: deque[Instruction] = deque()
        self.sent: list[Event] = []
        self.timeline = Timeline(self.rank)
        self.placement = self
        self.device = self
        self.type = "cpu"

    def send(self, *events: Event) -> None:
        self.sent.extend(events)

    def take_all(self, handle: Callable[[Instruction], None]) -> None:
        while self.inbox:
            handle(self.inbox.popleft())

    def receive(self, handle: Callable[[Instruction], None], waiting_for: str) -> None:
        if not self.inbox:
            raise NeedlessWaitError(waiting_for)
        handle(self.inbox.popleft())

    def sleep_until_message(self, timeout_s: float) -> None:
        if not self.inbox:
            raise NeedlessWaitError(f"{timeout_s:.1f} s")

    def pace_device(self, ahead: int = 2) -> float:
        """Nothing to pace."""
        return 0.0


class ScriptedFeed:
    """A loader that prefetches; ``when_empty`` is what comes in when it runs dry."""

    transfer_s = 0.0
    weight: float | None = None

    def __init__(self, shell: Shell, prefetched: int) -> None:
        self.shell = shell
        self.prefetched = prefetched
        self.when_empty: list[list[Instruction]] = []
        self.refill: Callable[[], None]
        self.queued: deque[int] = deque()
        self.drawn: deque[int | None] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.queued) or any(batch is not None for batch in self.drawn)

    def push(self, batch: int, _: object) -> None:
        self.queued.append(batch)

    def discard(self) -> None:
        self.queued.clear()
        self.drawn = deque(None for _ in self.drawn)

    def end(self) -> None:
        """Nothing more comes."""

    def take(self) -> tuple[int, str] | None:
        while len(self.drawn) < self.prefetched + 1:
            if not self.queued:
                if self.when_empty:
                    self.shell.inbox.extend(self.when_empty.pop(0))
                self.refill()
            self.drawn.append(self.queued.popleft() if self.queued else None)
        batch = self.drawn.popleft()
        return None if batch is None else (batch, "data")


class Sync:
    is_overlapped = is_common_step = False
    has_moved = True
    weighs_gradients = False

    def changed_buffers(self) -> tuple[int, ...]:
        return ()

    def begin_batch(self, weight: float, parts: float) -> None:
        """Nobody sums."""

    def batch_done(self) -> None:
        """Nobody sums."""

    def close(self, *, begins: bool) -> bool:
        return True


def open_window(window: int, wall_s: float | None) -> OpenWindow:
    return opened(window, wall_s=wall_s, patience_s=None)


def grant(batch: int) -> GrantBatches:
    return GrantBatches(rank=0, epoch=0, start=batch, stop=batch + 1)


def epoch_of(
    prefetched: int, sync: Sync | None = None
) -> tuple[Shell, ScriptedFeed, WindowEpoch]:
    shell, sync = Shell(), sync or Sync()
    feed = ScriptedFeed(shell, prefetched)
    positions = EpochPositions(list(range(80)), BatchSizes(((8, 10),)), 0, None)
    loop = WindowLoop(RankTime(1), overlapped=sync.is_overlapped)
    parts: Any = shell, feed, positions, sync, loop, hooks_without_run()
    epoch = WindowEpoch(*parts)
    feed.refill = epoch.refill
    return shell, feed, epoch


@pytest.mark.parametrize("wall_s", [None, 60.0])
@pytest.mark.parametrize("prefetched", [1, 4])
def test_a_lease_behind_empty_batches_is_trained_on_without_another_message(
    wall_s: float | None, prefetched: int
) -> None:
    # Once: after an empty batch the worker sleeps until the next instruction or the
    # window's end, although leases are queued behind it: with loader workers a run
    # hangs until its deadline (wall_s None) or loses whole windows.
    shell, feed, epoch = epoch_of(prefetched)
    shell.inbox.extend([open_window(0, wall_s), grant(3)])
    feed.when_empty = [[]] * (prefetched - 1) + [[grant(4)]]
    batches = epoch.batches()
    assert [next(batches), next(batches)] == ["data", "data"]
    with pytest.raises(NeedlessWaitError, match=r"lease|s"):
        next(batches)
    assert [e.start for e in shell.sent if isinstance(e, BatchesDone)] == [3, 4]


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("wall_s", [None, 60.0])
def test_an_order_to_close_that_comes_while_the_loader_draws_is_obeyed_at_once(
    wall_s: float | None, drain: bool
) -> None:
    # Once: the order is read by the loader's refill, and then the worker waits for
    # "another lease" (for ever) or the window's end without looking at it.
    shell, feed, epoch = epoch_of(1)
    shell.inbox.extend([open_window(0, wall_s), grant(3)])
    feed.when_empty = [[CloseWindow(rank=0, epoch=0, window=0, drain=drain)]]
    with pytest.raises(NeedlessWaitError, match="other ranks to end the window"):
        list(epoch.batches())
    done = [] if drain else [BatchesDone]
    assert [type(event) for event in shell.sent] == [*done, WindowClosed]
