"""``cadence``: El Che windows that end by wall time, then a blocking reduction.

Every rank trains on its own leases until the batch boundary nearest the common
deadline, and waits. When all are there the core says with which weights to reduce, and
opens the next window in the same breath, so that nobody waits for a message. Leases run
ahead of each rank's loader and shrink towards the end of the epoch: a rank gets another
batch only if it would finish it about when everything ends. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elche.cadence.alignment import aligned_anchor
from elche.cadence.el_che import ElChe, ElCheConfig
from elche.config import RunConfig
from elche.coordination.ledger import BatchSizes, EpochLedger
from elche.coordination.messages import (
    BatchDone,
    CloseWindow,
    EpochLeft,
    Event,
    GrantBatches,
    Instruction,
    OpenWindow,
    WindowClosed,
    WindowReduced,
)
from elche.coordination.policy import EpochTotals, Member, Outcome, Policy
from elche.coordination.reductions import ReductionPlanner
from elche.errors import ProtocolError

LOOKAHEAD_S = 0.05
MAX_AHEAD = 64


@dataclass(slots=True)
class _RankWindow:
    """What one rank has done in the window under way."""

    batches: int = 0
    timed_batches: int = 0
    timed_s: float = 0.0
    samples: int = 0
    closed: WindowClosed | None = None
    told_to_close: bool = False


class CadencePolicy(Policy):
    """Leases, windows and reductions of ``cadence``.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        epochs: epochs of the run if known; decides whether outer momentum pays.
    """

    def __init__(
        self, config: RunConfig, members: Sequence[Member], epochs: int | None
    ) -> None:
        self._config = config
        self._members = members
        self._world_size = len(members)
        self._el_che = ElChe(
            ElCheConfig(
                world_size=self._world_size,
                anchor=config.anchor,
                min_anchor=min(config.min_anchor, max(config.max_anchor, 1)),
                max_anchor=config.max_anchor,
                overhead_target=config.overhead_target,
                max_batch_diff=config.max_batch_diff,
                speed_hints=config.speed_hints,
            )
        )
        self._planner = ReductionPlanner(config, self._world_size, epochs)
        self._epoch = -1
        self._window = -1
        self._progress_samples = 0
        self._reducing: dict[int, float | None] = {}
        self._sync_s = 0.0
        self._ledger = EpochLedger(BatchSizes(()), range(self._world_size))
        self._totals = EpochTotals.zeros(self._world_size)
        self._ranks = [_RankWindow() for _ in members]
        self._last_done_s = [0.0 for _ in members]
        self._hungry: set[int] = set()
        self._draining = False
        self._final = False
        self._left: set[int] = set()

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Opens the epoch's first window with its first leases."""
        self._epoch = epoch
        self._ledger = EpochLedger(sizes, range(self._world_size))
        self._totals = EpochTotals.zeros(self._world_size)
        self._last_done_s = [now_s] * self._world_size
        self._hungry = set()
        self._draining = self._final = False
        self._left = set()
        self._reducing = {}
        instructions = self._open_window()
        granted = True
        while granted:
            granted = False
            for rank in range(self._world_size):
                first = self._top_up(rank, now_s, most=1)
                instructions += first
                granted |= bool(first)
        return Outcome(instructions + self._close_idle())

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event of the epoch under way."""
        if isinstance(event, BatchDone):
            return Outcome(self._batch_done(event, now_s))
        if isinstance(event, WindowClosed):
            return self._closed(event, now_s)
        if isinstance(event, WindowReduced):
            return self._reduced(event)
        if isinstance(event, EpochLeft):
            return Outcome(self._leave(event))
        raise ProtocolError(f"cadence: unexpected {type(event).__name__}")

    def check(self) -> None:
        """Asserts the ledger's invariants and the window's."""
        self._ledger.check()
        if not self._final:
            for rank, state in enumerate(self._ranks):
                assert state.batches == self._ledger.trained(rank), f"rank {rank}"

    def has_left(self, rank: int) -> bool:
        """Whether a rank's loop has left the epoch early."""
        return rank in self._left

    def waiting_for(self) -> str:
        """Ranks that have not closed, or not reduced, the window."""
        late = [rank for rank, sync_s in self._reducing.items() if sync_s is None]
        if late:
            return f"the reduction on ranks {late}"
        late = [r for r, state in enumerate(self._ranks) if state.closed is None]
        return f"ranks {late} to end window {self._window} of epoch {self._epoch}"

    def _batch_done(self, event: BatchDone, now_s: float) -> list[Instruction]:
        state = self._ranks[event.rank]
        if state.closed is not None or event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} trains outside its window")
        self._ledger.train(event.rank, event.batch, event.batch + 1)
        samples = self._ledger.sizes.run_of(event.batch)[0]
        if event.samples != samples:
            raise ProtocolError(
                f"rank {event.rank} claims {event.samples} samples of batch "
                f"{event.batch}, which has {samples}"
            )
        state.batches += 1
        state.samples += event.samples
        if event.warm:
            state.timed_batches += 1
            state.timed_s += event.busy_s
        self._last_done_s[event.rank] = now_s
        self._totals.add(event.rank, event.samples, event.busy_s, event.data_wait_s)
        instructions = self._top_up(event.rank, now_s)
        for rank in sorted(self._hungry - {event.rank}):
            instructions += self._top_up(rank, now_s)
        return instructions + self._close_idle()

    def _top_up(
        self, rank: int, now_s: float, most: int = MAX_AHEAD
    ) -> list[Instruction]:
        """Leases a rank as many batches as its loader draws ahead, and some more."""
        instructions: list[Instruction] = []
        self._hungry.discard(rank)
        if self._draining:
            return instructions
        batch_s = self._batch_s(rank)
        ahead = self._members[rank].horizon_batches + 1
        if batch_s > 0:
            ahead += min(MAX_AHEAD, max(1, math.ceil(LOOKAHEAD_S / batch_s)))
        while (
            self._ledger.pooled
            and self._ledger.leased(rank) < ahead
            and len(instructions) < most
        ):
            if not self._finishes_in_time(rank, now_s):
                self._hungry.add(rank)
                break
            start, stop = self._ledger.lease(rank, 1)
            instructions.append(
                GrantBatches(rank=rank, epoch=self._epoch, start=start, stop=stop)
            )
        return instructions

    def _finishes_in_time(self, rank: int, now_s: float) -> bool:
        """Whether a rank would end one more batch about when all work ends."""
        work, rate, earliest = float(self._ledger.pooled), 0.0, (math.inf, -1)
        finish_s = 0.0
        calibrated = self._el_che.is_calibrated
        for other in range(self._world_size):
            batch_s = self._batch_s(other) or 1.0
            begun_s = now_s - self._last_done_s[other] if calibrated else 0.0
            begun = min(1.0, max(0.0, begun_s / batch_s))
            leased = self._ledger.leased(other)
            left = max(0.0, leased - begun) if leased else 0.0
            work += left
            rate += 1.0 / batch_s
            earliest = min(earliest, ((left + 1.0) * batch_s, other))
            if other == rank:
                finish_s = (left + 1.0) * batch_s
        return finish_s <= work / rate + 0.5 * (self._batch_s(rank) or 1.0) or (
            earliest[1] == rank
        )

    def _batch_s(self, rank: int) -> float:
        """Delivered seconds per batch, as known (a rank not yet timed: the mean)."""
        known = self._el_che.ms_per_batch
        if known[rank] > 0:
            return known[rank] / 1e3
        timed = [ms for ms in known if ms > 0]
        return sum(timed) / len(timed) / 1e3 if timed else 0.0

    def _close_idle(self) -> list[Instruction]:
        """Tells ranks that will get no more work in this epoch to close."""
        others_wait = any(state.closed is not None for state in self._ranks)
        nothing_left = self._ledger.pooled == 0
        instructions: list[Instruction] = []
        for rank, state in enumerate(self._ranks):
            starved = nothing_left or (others_wait and rank in self._hungry)
            idle = self._draining or (starved and not self._ledger.leased(rank))
            if idle and state.closed is None and not state.told_to_close:
                state.told_to_close = True
                instructions.append(
                    CloseWindow(
                        rank=rank,
                        epoch=self._epoch,
                        window=self._window,
                        drain=self._draining,
                    )
                )
        return instructions

    def _closed(self, event: WindowClosed, now_s: float) -> Outcome:
        state = self._ranks[event.rank]
        if state.closed is not None or event.window != self._window or self._final:
            raise ProtocolError(
                f"rank {event.rank} closes window {event.window}, open is "
                f"{self._window}"
            )
        state.closed = event
        if self._draining:
            self._ledger.give_back(event.rank)
            self._ledger.abandon()
        if any(other.closed is None for other in self._ranks):
            return Outcome(self._close_idle())
        return self._end_window(now_s)

    def _end_window(self, now_s: float) -> Outcome:
        """All ranks are there: measure, reduce, and open the next window."""
        leased = any(self._ledger.leased(rank) for rank in range(self._world_size))
        self._final = self._draining or not (leased or self._ledger.pooled)
        if not any(state.batches for state in self._ranks):
            if self._final:
                return Outcome(self._end_epoch(), epoch_over=True)
            return Outcome(self._next_window(now_s))
        self._measure()
        instructions: list[Instruction] = [
            *self._planner.plan(
                [state.closed for state in self._ranks if state.closed is not None],
                [state.samples for state in self._ranks],
                self._ledger.sizes.num_batches,
                self._el_che.total_batches,
            )
        ]
        self._progress_samples += self._ledger.stage()
        self._reducing = dict.fromkeys(range(self._world_size))
        if not self._final:
            instructions += self._next_window(now_s)
        return Outcome(instructions)

    def _next_window(self, now_s: float) -> list[Instruction]:
        instructions = self._open_window()
        for rank in sorted(self._hungry):
            instructions += self._top_up(rank, now_s)
        return instructions + self._close_idle()

    def _measure(self) -> None:
        """Feeds El Che with delivered times; partial windows do not move the anchor."""
        tail = self._final or self._ledger.pooled == 0
        self._el_che.report_timing(
            [state.timed_s * 1e3 for state in self._ranks],
            [state.timed_batches for state in self._ranks],
            0.0 if tail else self._sync_s * 1e3,
        )

    def _reduced(self, event: WindowReduced) -> Outcome:
        """A rank has adopted the mean; when all have, the window is committed."""
        if self._reducing.get(event.rank, 0.0) is not None:
            raise ProtocolError(f"rank {event.rank} reduced no window {event.window}")
        self._reducing[event.rank] = event.sync_s
        costs_s = [cost for cost in self._reducing.values() if cost is not None]
        if len(costs_s) < self._world_size:
            return Outcome()
        self._sync_s = max(costs_s)
        self._totals.sync_s += self._sync_s
        self._totals.windows += 1
        self._ledger.commit()
        if self._final:
            return Outcome(self._end_epoch(), epoch_over=True)
        return Outcome()

    def _open_window(self) -> list[Instruction]:
        """Opens the next window: by wall time once speeds are known."""
        self._window += 1
        self._ranks = [_RankWindow() for _ in self._members]
        wall_ms = self._wall_ms()
        stretch = wall_ms / self._el_che.anchor_wall_ms if wall_ms > 0 else 1.0
        counts = [round(count * stretch) for count in self._el_che.batch_counts]
        samples, _ = self._ledger.sizes.runs[0] if self._ledger.sizes.runs else (0, 0)
        planned = min(sum(counts), self._ledger.sizes.num_batches) * samples
        return [
            OpenWindow(
                rank=rank,
                epoch=self._epoch,
                window=self._window,
                wall_s=wall_ms / 1e3 if wall_ms > 0 else None,
                max_batches=self._max_batches(rank, by_wall=wall_ms > 0),
                committed_samples=self._progress_samples,
                planned_samples=planned,
                planned_batches=counts[rank],
            )
            for rank in range(self._world_size)
        ]

    def _wall_ms(self) -> float:
        """Length of the window, 0 while it can only be counted.

        An anchor that the user has not fixed may be stretched to one at which whole
        batches of all ranks end together.
        """
        el_che = self._el_che
        if not el_che.enabled or not el_che.is_calibrated:
            return 0.0
        wall_ms, costs_ms = el_che.anchor_wall_ms, el_che.ms_per_batch
        fixed = self._config.anchor >= self._config.max_anchor
        if fixed or not all(cost > 0 for cost in costs_ms):
            return wall_ms
        anchor = aligned_anchor(el_che.anchor, costs_ms, self._config.max_anchor)
        return wall_ms * anchor / el_che.anchor

    def _max_batches(self, rank: int, *, by_wall: bool) -> int | None:
        counts = self._el_che.batch_counts
        if not by_wall:
            return counts[rank]
        if self._config.max_batch_diff is None:
            return None
        return max(1, min(counts) + self._config.max_batch_diff)

    def _leave(self, event: EpochLeft) -> list[Instruction]:
        """A loop left early: the epoch ends for all, with a draining commit."""
        if event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} leaves epoch {event.epoch}")
        self._draining = True
        self._left.add(event.rank)
        self._ledger.abandon()
        self._ranks[event.rank].told_to_close = True
        return self._close_idle()

    def _end_epoch(self) -> list[Instruction]:
        total = sum(self._totals.samples) or 1
        return self._totals.end_epoch(
            self._epoch,
            self._el_che.anchor,
            [samples / total for samples in self._totals.samples],
        )
