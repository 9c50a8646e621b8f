"""An epoch under ``cadence``, as one rank runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elche.cadence.throughput import CostEstimate
from elche.cadence.window import should_close
from elche.comm.averaging import ParameterAverager
from elche.coordination.messages import (
    BatchDone,
    CloseWindow,
    EndEpoch,
    EpochLeft,
    GrantBatches,
    Instruction,
    OpenWindow,
    Reduce,
    WindowClosed,
    WindowReduced,
)
from elche.errors import ElcheError, ProtocolError
from elche.runtime.leased_data import BatchFeed
from elche.runtime.positions import EpochPositions
from elche.runtime.transfer import to_device
from elche.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class CadenceHooks:
    """What an epoch asks of its run.

    Attributes:
        on_error: told about an error that a `break` cannot raise.
        check: called at the end of every window; raises if the run cannot go on.
    """

    on_error: Callable[[ElcheError], None]
    check: Callable[[], None]


class CadenceEpoch:
    """Trains on leases until each window's end, then joins its reduction.

    Args:
        worker: this rank's shell.
        feed: the leased stream of batches.
        positions: the epoch.
        averager: averages the parameters.
        batch_cost: this rank's delivered seconds per batch, kept over epochs.
        hooks: where errors go, and what is checked.
    """

    def __init__(
        self,
        worker: Worker,
        feed: BatchFeed[int],
        positions: EpochPositions,
        averager: ParameterAverager,
        batch_cost: CostEstimate,
        hooks: CadenceHooks,
    ) -> None:
        self._worker = worker
        self._feed = feed
        self._positions = positions
        self._averager = averager
        self._batch_cost = batch_cost
        self._hooks = hooks
        self._window: OpenWindow | None = None
        self._close: CloseWindow | None = None
        self._plan: OpenWindow | None = None
        self._batches = 0
        self._opened_s = 0.0
        self._closed_s = 0.0
        self._left = False
        self._in_hand: tuple[int, float, float] | None = None
        self.end: EndEpoch | None = None

    @property
    def progress_samples(self) -> float:
        """Samples of the run committed before this window, plus planned ones so far."""
        plan = self._plan
        if plan is None:
            return 0.0
        part = min(1.0, self._batches / max(1, plan.planned_batches))
        return plan.committed_samples + plan.planned_samples * part

    @property
    def samples_in_hand(self) -> int:
        """Samples of the batch in hand."""
        if self._in_hand is None:
            return 0
        return self._positions.samples_of(self._in_hand[0])

    def refill(self) -> None:
        """Reads leases that have come; called when the loader draws."""
        self._worker.take_all(self._handle)

    def batches(self) -> Iterator[Any]:
        """Yields this rank's batches; a break drains and ends the epoch everywhere."""
        try:
            yield from self._train()
        except GeneratorExit:
            try:
                self._leave()
            except ElcheError as error:
                self._hooks.on_error(error)

    def _train(self) -> Iterator[Any]:
        began_s = time.monotonic()
        while True:
            self._worker.take_all(self._handle)
            if self.end is not None:
                return
            if self._window is None:
                self._worker.receive(self._handle, "the other ranks to end the window")
                continue
            if self._is_over(time.monotonic()):
                self._close_window()
                continue
            got = self._feed.next()
            if got is None:
                self._wait_for_lease()
                continue
            batch, data = got
            ready_s = time.monotonic()
            began_s = max(began_s, self._opened_s)
            if self._worker.placement.device.type != "cpu":
                data = to_device(data, self._worker.placement.device)
            self._worker.span("data wait", "data wait", began_s, ready_s)
            self._in_hand = (batch, began_s, ready_s)
            yield data
            self._batch_done()
            began_s = time.monotonic()

    def _batch_done(self) -> None:
        """The loop came back: the batch in hand is trained on."""
        if self._in_hand is None:
            return
        batch, began_s, ready_s = self._in_hand
        self._in_hand = None
        self._worker.pace_device()
        busy_s = time.monotonic() - began_s
        samples = self._positions.samples_of(batch)
        warm, self._worker.is_cold = not self._worker.is_cold, False
        if warm:
            self._batch_cost.observe(busy_s)
        self._batches += 1
        self._worker.send(
            BatchDone(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                batch=batch,
                samples=samples,
                busy_s=busy_s,
                data_wait_s=ready_s - began_s,
                warm=warm,
            )
        )
        self._worker.span(f"batch {batch}", "batch", ready_s, samples=samples)

    def _is_over(self, now_s: float) -> bool:
        window = self._window
        assert window is not None
        if self._close is not None and self._close.window == window.window:
            return True
        if window.max_batches is not None and self._batches >= window.max_batches:
            return True
        if window.wall_s is None:
            return False
        return should_close(
            now_s - self._opened_s,
            self._batch_cost.value,
            window.wall_s,
            self._batches,
        )

    def _wait_for_lease(self) -> None:
        """Nothing leased is left: sleep until told, or until the window's deadline."""
        window = self._window
        assert window is not None
        if self._feed.has_work or self._close is not None:
            return
        if window.wall_s is None:
            self._worker.receive(self._handle, "another lease")
            return
        left_s = self._opened_s + window.wall_s - time.monotonic()
        if left_s > 0:
            self._worker.sleep_until_told(left_s)
        else:
            self._close_window()

    def _close_window(self) -> None:
        window = self._window
        assert window is not None
        self._hooks.check()
        self._window = None
        self._closed_s = time.monotonic()
        self._worker.send(
            WindowClosed(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=window.window,
                state=self._averager.state_layout(),
                changed_buffers=self._averager.changed_buffers(),
            )
        )

    def _handle(self, instruction: Instruction) -> None:
        if isinstance(instruction, GrantBatches):
            if not self._left:
                for batch in range(instruction.start, instruction.stop):
                    self._feed.push(batch, self._positions.index_batch(batch))
        elif isinstance(instruction, OpenWindow):
            self._window = self._plan = instruction
            self._close = None
            self._batches = 0
            self._opened_s = time.monotonic()
        elif isinstance(instruction, CloseWindow):
            self._close = instruction
            if instruction.drain:
                self._feed.discard()
        elif isinstance(instruction, Reduce):
            self._reduce(instruction)
        elif isinstance(instruction, EndEpoch):
            self.end = instruction
            self._feed.end()
        else:
            raise ProtocolError(f"unexpected in an epoch of cadence: {instruction!r}")

    def _reduce(self, plan: Reduce) -> None:
        """All ranks are there: reduce and say so."""
        self._worker.span("wait for ranks", "sync wait", self._closed_s)
        started_s = time.monotonic()
        self._averager.synchronise(plan)
        self._worker.span(f"sync {plan.window}", "sync", started_s)
        self._worker.send(
            WindowReduced(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=plan.window,
                sync_s=time.monotonic() - started_s,
            )
        )

    def _leave(self) -> None:
        """The loop broke off: commit what was trained, and end the epoch for all."""
        if self.end is not None:
            return
        self._left = True
        self._batch_done()
        epoch = self._positions.epoch
        self._worker.send(
            EpochLeft(rank=self._worker.rank, epoch=epoch, step=self._batches)
        )
        self._feed.discard()
        while self.end is None:
            if self._window is not None:
                self._close_window()
            self._worker.receive(self._handle, "the draining commit of the epoch")
