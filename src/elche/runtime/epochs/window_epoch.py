"""Execution of an epoch of windows on one rank, as `WindowLoop` decides."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from elche.comm.averaging.window_sync import SyncResult, WindowSync
from elche.coordination.accounts.batch_ranges import Range, append_range
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import (
    EpochLeft,
    Event,
    ModelUpdated,
    Regrouped,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    Adopt,
    CloseWindow,
    EndEpoch,
    GrantBatches,
    Instruction,
    Reduce,
    Regroup,
)
from elche.coordination.windows.lease_reports import LeaseReports
from elche.coordination.windows.window_loop import Action, Do, WindowLoop
from elche.errors import ElcheError, ProtocolError, RankLostError
from elche.monitor.trace import SYNC, SYNC_WAIT
from elche.runtime.data.leased_data import LeasedBatches
from elche.runtime.data.positions import EpochPositions
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import warn_discarded
from elche.runtime.sync.epoch_hooks import EpochHooks
from elche.runtime.watch.live_graph import fetched_too_early
from elche.runtime.windows.regrouping import OpenReduction

logger = logging.getLogger(__name__)


class WindowEpoch:
    """Runs the windows of an epoch on this rank's leases."""

    def __init__(
        self,
        worker: Worker,
        batches: LeasedBatches,
        positions: EpochPositions,
        sync: WindowSync,
        loop: WindowLoop,
        hooks: EpochHooks,
    ) -> None:
        self._worker = worker
        self._leased = batches
        self._positions = positions
        self._sync = sync
        self._loop = loop
        self._hooks = hooks
        self._graphs = hooks.observer.graphs
        self._policy = "async" if sync.is_overlapped else "cadence"
        self._reports = LeaseReports(worker.rank, positions.epoch)
        self._not_begun = 0
        self._current: tuple[int, int, float, float] | None = None
        self._current_weight = 0.0
        self._trained: list[Range] = []
        self._weight: float | None = None
        self._transfer_s = 0.0
        self._is_leaving = self._has_trained = False
        self._last: Reduce | None = None
        self._closed_s = 0.0
        self._waited_s = 0.0
        self._late_s = 0.0  # in which the device computed batches of the last window
        self._held_s = self._polled_s = 0.0  # a poll may sum

    @property
    def end(self) -> EndEpoch | None:
        """The coordinator's `EndEpoch`, once it has arrived."""
        return self._loop.end

    @property
    def progress_samples(self) -> float:
        """Samples of the run before this window, plus planned ones so far."""
        return self._loop.progress_samples

    @property
    def current_samples(self) -> int:
        """Samples of the current batch."""
        return 0 if self._current is None else self._current[1]

    @property
    def current_weight(self) -> float:
        """Weight of the current batch in means: its samples, or ``weight_of``."""
        return 0.0 if self._current is None else self._current_weight

    def refill(self) -> None:
        """Handles received leases; called when the loader draws."""
        self._worker.take_all(self.handle)

    def batches(self) -> Generator[Any, None, None]:
        """Yields this rank's batches; a break drains and ends the epoch everywhere."""
        refuse = partial(_refuse_late, self._policy)
        on_late = refuse if self._sync.weighs_gradients else None
        self._graphs.begin_epoch(on_late, refuse)
        try:
            yield from self._train()
        except GeneratorExit:
            self.leave()
            self._graphs.allow_looks(refuse)
        finally:
            self._graphs.end_epoch()

    def leave(self) -> None:
        """Ends the epoch for all, when the loop has broken off."""
        try:
            self._leave()
        except ElcheError as error:
            self._hooks.on_error(error)

    def _train(self) -> Iterator[Any]:
        began_s = time.monotonic()
        while True:
            action = self._next()
            began_s += self._polled_s  # else the next batch would have it
            if self._is_stop(action):
                self._end()
                return
            if action.do is not Do.TRAIN:
                self._carry_out(action)
                began_s = time.monotonic()
                continue
            got = self._leased.take()
            if got is None:
                continue
            batch, data = got
            ready_s = time.monotonic()
            samples = self._positions.samples_of(batch)
            self._current = (batch, samples, began_s, ready_s)
            self._not_begun -= 1
            self._transfer_s = self._leased.transfer_s
            by_user = self._leased.weight
            self._current_weight = float(samples) if by_user is None else by_user
            parts = self._positions.sizes.factor_of(batch)
            self._sync.begin_batch(self._current_weight, float(parts))
            self._graphs.begin(batch, data)
            if not self._sync.is_common_step:
                self._hooks.observer.schedulers.advance(self.progress_samples)
            self._hooks.observer.copies.begin_batch(samples)
            yield data
            self._batch_done()
            began_s = time.monotonic()

    def _next(self) -> Action:
        self._worker.take_all(self.handle)
        began_s = time.monotonic()
        is_reduced = self._loop.in_flight is not None and self._sync.poll()
        now_s = time.monotonic()
        self._polled_s = now_s - began_s
        self._held_s += self._polled_s
        return self._loop.next(
            now_s,
            has_work=self._not_begun > 0,
            is_reduced=is_reduced,
            is_live=self._graphs.is_live,
        )

    def _is_stop(self, action: Action) -> bool:
        """True if the epoch is over; a new group is then formed between epochs."""
        return action.do is Do.STOP or (
            action.do is Do.REGROUP and self._loop.end is not None
        )

    def _carry_out(self, action: Action) -> None:
        """Carries out an action other than training; a lost rank interrupts it."""
        instruction: Any = action.instruction  # of the type that the action needs
        with contextlib.suppress(RankLostError):  # its `Regroup` is queued
            match action.do:
                case Do.WAIT:
                    self._wait(action)
                case Do.CLOSE:
                    self._close_window()
                case Do.BEGIN:
                    began_s = time.monotonic()
                    self._sync.begin(instruction)
                    self._loop.begun()
                    self._held_s += time.monotonic() - began_s
                case Do.REDUCE | Do.FINISH:
                    self._reduce(instruction, is_begun=action.do is Do.FINISH)
                case Do.ADOPT:
                    self._adopt(instruction)
                case _:
                    self._regroup()

    def _wait(self, action: Action) -> None:
        began_s = time.monotonic()
        if action.timeout_s is None:
            self._worker.receive(self.handle, action.why)
        else:
            self._worker.sleep_until_message(action.timeout_s)
        self._waited_s += time.monotonic() - began_s

    def _batch_done(self) -> None:
        """Records the current batch as trained, when the loop asks for the next."""
        if self._current is None:
            return
        batch, samples, began_s, ready_s = self._current
        self._current, self._has_trained = None, True
        self._hooks.observer.copies.begin_batch(0)
        if self._leased.weight is not None:
            self._weight = (self._weight or 0.0) + self._current_weight
        append_range(self._trained, (batch, batch + 1))
        self._worker.pace_device()
        self._sync.batch_done()
        now_s = time.monotonic()
        times_s = began_s, ready_s, now_s
        is_timed, self._worker.is_cold = not self._worker.is_cold, False
        cost = BatchCost.measured(samples, times_s, self._transfer_s, is_timed=is_timed)
        if is_timed:
            cost.busy_s += self._late_s
            self._late_s = 0.0
        self._loop.trained(cost.busy_s if is_timed else None)
        if self._reports.batch_done(batch, cost) or self._loop.is_throttled:
            self._report()
        self._worker.timeline.record(("batch", batch, *times_s, samples, 0.0))

    def _report(self, *more: Event) -> None:
        """Reports finished batches of a lease, and further events."""
        done = self._reports.take(self._loop.window)
        self._worker.send(*([] if done is None else [done]), *more)

    def _close_window(self) -> None:
        self._hooks.check()
        if self._sync.is_common_step:
            committed = self._loop.committed_samples
            self._hooks.observer.schedulers.advance(committed, is_agreed=True)
        self._late_s += self._worker.pace_device(0)
        began_s = time.monotonic()
        is_finite = self._sync.close(begins=self._loop.begins_at_close)
        if not is_finite:
            warn_discarded(self._worker.rank, self._trained, self._positions)
        waits = not (self._sync.is_overlapped and self._leased.has_work)
        self._report(
            WindowClosed(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=self._loop.window,
                changed_buffers=self._sync.changed_buffers(),
                is_finite=is_finite,
                has_moved=self._sync.has_moved,
                scalars=self._hooks.observer.scalars.drain(final=waits),
                weight=self._weight,
                periods=self._hooks.observer.schedulers.periods(),
                copies=self._hooks.observer.copies.closed(is_finite=is_finite),
            ),
        )
        self._trained.clear()
        self._weight = None
        self._closed_s = time.monotonic()
        self._held_s = self._closed_s - began_s
        self._waited_s = 0.0
        self._loop.closed(began_s, is_finite=is_finite)

    def _reduce(self, plan: Reduce, *, is_begun: bool) -> None:
        """Applies the window's result to the model and reports it."""
        started_s = time.monotonic()
        if not self._sync.is_overlapped:
            waited = self._closed_s, started_s
            self._worker.timeline.add("wait for ranks", SYNC_WAIT, *waited)
        wait_s, held_s = self._waited_s, self._held_s
        if is_begun:
            drained = self._loop.batches == 0
            result: SyncResult = self._sync.finish(plan, is_drained=drained)
        else:
            result = self._sync.reduce(plan)
        self._graphs.moved(self._policy)
        adopted_at = self._loop.batches if is_begun else 0
        now_s = time.monotonic()
        self._worker.timeline.add(f"sync {plan.window}", SYNC, started_s, now_s)
        self._loop.reduced(now_s)
        held_s = now_s - started_s + (held_s if is_begun else 0.0)
        self._waited_s = self._held_s = 0.0
        norm = result.parameter_norm
        # Checks the common model: nothing was trained since, or it is kept apart.
        self._hooks.sums.begin(plan.window, plan.window, self._sync.common())
        self._worker.send(
            ModelUpdated(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=plan.window,
                sync_s=held_s,
                wait_s=wait_s,
                divergence=result.divergence,
                adopted_at=adopted_at,
                parameter_norm=self._hooks.parameter_norm() if norm is None else norm,
                checks=self._hooks.sums.take(plan.window),
            )
        )
        # Not counted as a reduction's cost: there is one update per batch.
        self._hooks.observer.copies.committed(plan.copies, self._sync.common)

    def _regroup(self) -> None:
        """Forms the next group after deaths, and settles the open reduction."""
        regrouping, last = self._hooks.regrouping, self._last
        self._report()
        lacks = last is not None and self._loop.reduced_window < last.window
        if last is not None and lacks and self._sync.has_sum(last):
            self._reduce(last, is_begun=True)
            lacks = False
        keeps = self._loop.batches > 0
        was_open = None if last is None else OpenReduction(last, lacks, keeps)
        regrouping.settle(regrouping.meet(), was_open, self._taken_over)
        self._loop.regrouped()
        self._waited_s = self._held_s = 0.0
        self._worker.send(
            Regrouped(
                rank=self._worker.rank,
                generation=self._worker.groups.generation,
                epoch=self._positions.epoch,
                reduced=self._loop.reduced_window,
            )
        )

    def _taken_over(self) -> None:
        """Records the last reduction's result, copied from another rank."""
        assert self._last is not None
        self._graphs.moved(self._policy)
        self._loop.reduced(time.monotonic())
        self._hooks.observer.copies.committed(self._last.copies, self._sync.common)

    def _adopt(self, instruction: Adopt) -> None:
        """Reports the result that all survivors hold since they formed the group.

        Without checksums, since some ranks may have trained since.
        """
        if self._loop.reduced_window < instruction.window:
            raise ProtocolError(
                f"rank {self._worker.rank} holds window {self._loop.reduced_window}, "
                f"got {instruction!r}"
            )
        self._loop.reduced(time.monotonic())
        self._worker.send(
            ModelUpdated(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=instruction.window,
                parameter_norm=self._hooks.parameter_norm(),
            )
        )

    def handle(self, instruction: Instruction) -> None:
        """Handles an instruction of the epoch."""
        if isinstance(instruction, GrantBatches):
            if not self._is_leaving:
                self._reports.granted(instruction)
                self._not_begun += instruction.stop - instruction.start
                for batch in range(instruction.start, instruction.stop):
                    self._leased.push(batch, self._positions.index_batch(batch))
            return
        match instruction:
            case CloseWindow(drain=True):
                self._discard()
            case EndEpoch():
                self._leased.end()
            case Regroup():
                self._worker.note_regroup(instruction)
            case Reduce():
                self._last = instruction
                self._hooks.observer.schedulers.agree(instruction.periods)
        self._loop.handle(instruction, time.monotonic())

    def _discard(self) -> None:
        """Returns leases that were not begun."""
        self._report()
        self._leased.discard()
        self._reports.void()
        self._not_begun = 0

    def _leave(self) -> None:
        """Commits batches trained before a break, and ends the epoch for all."""
        if self._worker.is_closed:
            return
        if self.end is not None:
            self._end()
            return
        self._is_leaving = True
        self._batch_done()
        epoch = self._positions.epoch
        logger.info(
            "rank %d left the loop of epoch %d early, after %d batches of window %d: "
            "the epoch ends on all ranks, and %d batches leased to this rank return "
            "to the pool",
            self._worker.rank,
            epoch,
            self._loop.batches,
            self._loop.window,
            self._not_begun,
        )
        self._discard()
        left = EpochLeft(rank=self._worker.rank, epoch=epoch, step=self._loop.batches)
        self._worker.send(left)
        while not self._is_stop(action := self._next()):
            self._carry_out(action)
        self._end()

    def _end(self) -> None:
        """Ends the epoch; every rank's model holds all its contributions."""
        self._hooks.observer.copies.end_epoch(
            self._worker.group, has_trained=self._has_trained
        )


def _refuse_late(policy: str, *_: int | None) -> None:
    """Refuses a pass of an earlier batch, whose window may have ended."""
    raise fetched_too_early(policy)
