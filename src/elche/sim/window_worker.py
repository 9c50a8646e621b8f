"""An epoch of windows on a simulated rank: executes `WindowLoop`'s actions.

The counterpart in virtual time of `elche.runtime.epochs.window_epoch`, which has a
loader, a device and collectives. The decision code is the same. Pure.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from elche.coordination.protocol.events import EpochLeft, ModelUpdated, WindowClosed
from elche.coordination.protocol.instructions import (
    Adopt,
    BeginEpoch,
    CloseWindow,
    EndEpoch,
    GrantBatches,
    Instruction,
    MetricsReported,
    PolicyChosen,
    Reduce,
    Regroup,
)
from elche.coordination.windows.lease_reports import LeaseReports
from elche.coordination.windows.window_loop import Action, Do, WindowLoop
from elche.sim.engine import Collective, Receive, Script
from elche.sim.history import LEASE, REDUCTION, THROTTLE, WINDOW_END
from elche.sim.rank import Rank
from elche.sim.simulated_loader import Loaded, Loader


class SimulatedWindowEpoch:
    """Trains leased batches from window to window.

    Args:
        rank: the training rank.
        begin: the coordinator's instruction that begins it.
    """

    def __init__(self, rank: Rank, begin: BeginEpoch) -> None:
        rank.reduced = begin.window - 1
        self._rank = rank
        self._sim = rank.sim
        self._epoch = begin.epoch
        self._overlapped = begin.policy == "async"
        self._loader = Loader(rank.device.load_seconds_per_sample, rank.device.prefetch)
        self._loop = WindowLoop(
            rank.batch_cost, overlapped=self._overlapped, reduced=begin.window - 1
        )
        copy_s = rank.sim.cluster.run.model_bytes / rank.device.copy_bytes_per_s
        self._copy_s = copy_s if self._overlapped else 0.0
        self._reports = LeaseReports(rank.rank, begin.epoch)
        self._bad = frozenset(rank.sim.cluster.run.bad_batches)
        self._is_finite = True
        self._in_flight: Collective | None = None
        self._last: Reduce | None = None
        self._batches_drawn = 0
        self._break_at = rank.sim.break_at(rank.rank, begin.epoch)
        self._is_leaving = False
        self._closed_s = 0.0
        self._waited_s = self._held_s = 0.0

    def train(self) -> Generator[Any, Any, EndEpoch]:
        """Trains the rest of the epoch, or of one part of it."""
        rank, loop, loader = self._rank, self._loop, self._loader
        inbox = rank.engine.processes[rank.rank].inbox
        while True:
            if inbox:
                rank.take_all(self._handle)
            in_flight = self._in_flight
            action = loop.next(
                rank.now_s,
                has_work=loader.has_work,
                is_reduced=in_flight is not None
                and in_flight.done_s.get(rank.rank, float("inf")) <= rank.now_s,
            )
            if rank.is_back and action.do in (Do.TRAIN, Do.STOP):
                rank.note_recovery()
            if action.do is Do.TRAIN:
                yield from self._train_on(loader.take(rank.now_s))
            elif loop.end is not None and action.do in (Do.STOP, Do.REGROUP):
                if action.do is Do.REGROUP:  # between epochs
                    assert action.instruction is not None
                    inbox.appendleft(action.instruction)
                return loop.end
            else:
                yield from self._carry_out(action)

    def _train_on(self, item: Loaded) -> Script:
        rank = self._rank
        cost = yield from rank.run_batch(item, f"batch {item.number}")
        if books := rank.books:
            books.trained(rank.rank, self._epoch, item.parts)
        if self._bad:
            whole = {int(rank.whole.batches_in(start)) for start, _ in item.parts}
            self._is_finite &= not whole & self._bad
        self._loop.trained(cost.busy_s if cost.is_timed else None)
        if self._reports.batch_done(item.number, cost) or self._loop.is_throttled:
            self._report()
        self._batches_drawn += 1
        if self._batches_drawn == self._break_at:
            self._leave()

    def _carry_out(self, action: Action) -> Script:
        match action.do, action.instruction:
            case Do.WAIT, None:
                yield from self._wait(action)
            case Do.CLOSE, None:
                yield from self._close()
            case Do.BEGIN, Reduce(window=window):
                self._in_flight = self._in_flight or self._reduction(window)
                self._loop.begun()
            case Do.REDUCE, Reduce() as plan:
                yield from self._reduce(plan, self._reduction(plan.window))
            case Do.FINISH, Reduce() as plan:
                assert self._in_flight is not None
                yield from self._reduce(plan, self._in_flight)
            case Do.ADOPT, Adopt() as adopt:
                assert self._loop.reduced_window >= adopt.window
                self._adopted(adopt, self._rank.now_s)  # it was copied in the new group
            case Do.REGROUP, Regroup() as regroup:
                yield from self._reform(regroup)
            case _:
                raise AssertionError(action)

    def _wait(self, action: Action) -> Script:
        rank, began_s = self._rank, self._rank.now_s
        yield Receive(action.why, action.timeout_s)
        cause = WINDOW_END
        if "slowest" in action.why:
            cause = THROTTLE
        elif "lease" in action.why and not self._has_ended():
            cause = LEASE
        elif "reduction" in action.why:
            cause = REDUCTION
        self._waited_s += rank.now_s - began_s
        rank.history.wait(rank.rank, cause, began_s, rank.now_s)

    def _has_ended(self) -> bool:
        """True if the coordinator has ended the window, so that the wait is over."""
        inbox = self._rank.engine.processes[self._rank.rank].inbox
        return any(isinstance(item, CloseWindow) for item in inbox)

    def _close(self) -> Script:
        rank, loop = self._rank, self._loop
        began_s = rank.now_s
        if self._copy_s:
            yield self._copy_s
            rank.sums.copies_s += self._copy_s
        self._report()
        if books := rank.books:
            books.offer(rank.rank, loop.window, is_finite=self._is_finite)
        self._sim.send(
            WindowClosed(
                rank=rank.rank,
                epoch=self._epoch,
                window=loop.window,
                changed_buffers=(),
                is_finite=self._is_finite,
            )
        )
        self._closed_s = rank.now_s
        self._held_s = rank.now_s - began_s
        self._waited_s = 0.0
        if loop.begins_at_close:
            self._in_flight = self._reduction(loop.window)
        loop.closed(began_s, is_finite=self._is_finite)
        self._is_finite = True

    def _reduction(self, window: int) -> Collective:
        """Joins the reduction of a window."""
        rank = self._rank
        key = ("window", rank.run, rank.generation, window)
        members = self._sim.groups[rank.generation]
        run = self._sim.cluster.run

        def new() -> Collective:
            cost_s = rank.engine.link.reduce_s(run.model_bytes, len(members))
            return Collective(members, cost_s)

        collective = rank.engine.arrive(key, rank.rank, new)
        if len(collective.arrived) == len(members):
            rank.history.windows += 1
        return collective

    def _reduce(self, plan: Reduce, collective: Collective) -> Script:
        """Waits for a reduction's result and adopts it."""
        rank, began_s = self._rank, self._rank.now_s
        is_done = collective.done_s.get(rank.rank, float("inf")) <= began_s
        if not is_done:
            is_done = yield collective
            rank.history.wait(rank.rank, REDUCTION, began_s, rank.now_s)
        if not is_done:
            yield from rank.await_regroup(self._handle)
            return
        if self._copy_s:
            yield self._copy_s
            rank.sums.copies_s += self._copy_s
        self._in_flight = None
        if books := rank.books:
            if collective.value is None:
                weights = self._sim.plans[plan.window]
                collective.value = books.reduce(
                    {member: weights[member] for member in collective.members}
                )
            books.adopt(rank.rank, plan.window, collective.value)
        self._adopted(plan, began_s)

    def _adopted(self, plan: Reduce | Adopt, began_s: float) -> None:
        """Reports that this rank has adopted the common model."""
        rank, loop = self._rank, self._loop
        overlapped = self._overlapped and isinstance(plan, Reduce)
        adopted_at = loop.batches if overlapped else 0
        held_s = rank.now_s - began_s + (self._held_s if overlapped else 0.0)
        if overlapped:
            lag_s = rank.now_s - self._closed_s
            sums = rank.sums
            sums.adoptions += 1
            sums.lag_batches += adopted_at
            sums.most_lag_batches = max(sums.most_lag_batches, adopted_at)
            sums.lag_s += lag_s
            sums.most_lag_s = max(sums.most_lag_s, lag_s)
        self._sim.send(
            ModelUpdated(
                rank=rank.rank,
                epoch=self._epoch,
                window=plan.window,
                sync_s=held_s,
                wait_s=self._waited_s,
                adopted_at=adopted_at,
            )
        )
        self._waited_s = self._held_s = 0.0
        loop.reduced(rank.now_s)
        rank.reduced = loop.reduced_window

    def _reform(self, regroup: Regroup) -> Script:
        """Forms the next group; ranks without the last result copy it there."""
        rank, loop, last = self._rank, self._loop, self._last
        self._report()
        lacks = last is not None and loop.reduced_window < last.window
        holds = last is not None and not lacks
        shared = yield from rank.regroup(regroup, (lacks, holds))
        if shared is None:
            yield from rank.await_regroup(self._handle)
            return
        holders = [each for each in sorted(shared) if shared[each][1]]
        if holders and any(lack for lack, _ in shared.values()):
            if not (yield from rank.broadcast("result", holders[0])):
                yield from rank.await_regroup(self._handle)
                return
            if lacks:
                assert last is not None
                loop.reduced(rank.now_s)
                rank.reduced = loop.reduced_window
                if books := rank.books:
                    books.take(rank.rank, holders[0], last.window)
        loop.regrouped()
        self._in_flight = None
        rank.report_regrouped(rank.reduced)

    def _report(self) -> None:
        """Sends the finished batches of a lease to the coordinator."""
        if event := self._reports.take(self._loop.window):
            self._sim.send(event)

    def _handle(self, instruction: Instruction) -> None:
        rank = self._rank
        match instruction:
            case GrantBatches(start=start, stop=stop):
                if not self._is_leaving:
                    self._reports.granted(instruction)
                    self._loader.push(map(self._loaded, range(start, stop)), rank.now_s)
                return
            case MetricsReported() | PolicyChosen():
                return
            case CloseWindow(drain=True):
                self._discard()
            case Reduce():
                self._last = instruction
        self._loop.handle(instruction, rank.now_s)

    def _loaded(self, batch: int) -> Loaded:
        samples, _ = self._rank.sizes.run_of(batch)
        parts = self._rank.parts_of(batch, 0, samples)
        return Loaded(batch, samples, samples, parts)

    def _discard(self) -> None:
        self._report()
        self._loader.discard()
        self._reports.void()

    def _leave(self) -> None:
        """Leaves the loop early: commits trained batches, ends the epoch for all."""
        self._is_leaving = True
        self._discard()
        self._sim.send(
            EpochLeft(rank=self._rank.rank, epoch=self._epoch, step=self._loop.batches)
        )
