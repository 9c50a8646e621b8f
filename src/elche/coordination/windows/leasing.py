"""Leases of batches to ranks, so that all end an epoch together. Pure.

A rank holds as many batches as its loader draws ahead, plus about ``LOOKAHEAD_S`` of
work. Towards an epoch's end, a batch is leased only to ranks that can end it by about
the end of all work, or to the rank that would end it first. Sums over ranks are updated
incrementally, so a decision costs nearly the same for two ranks and for ten thousand,
except for a logarithm.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elche.coordination.accounts.ledger import EpochLedger
from elche.coordination.protocol.instructions import GrantBatches

LOOKAHEAD_S = 0.2
"""Work (s) that a rank holds beyond what its loader draws ahead. A rank reports when it
has done about half of it. Each report costs a system call (up to 0.3 ms), and each held
batch waits for its rank if that suddenly slows down.
"""
LOOKAHEAD_PER_RANK_S = 1e-3
MAX_AHEAD = 64
STALE_ENTRIES = 4
"""Most heap entries per rank, stale ones included."""

_Entry: TypeAlias = tuple[float, int, int]
"""Heap entry: a time, a rank, and the version of its `_Pace`."""


@dataclass(slots=True)
class _Pace:
    """Speed and position of one rank."""

    horizon_batches: int
    batch_s: float
    since_s: float
    version: int = 0
    begun_rate: float = 0.0
    begun_at: float = 0.0
    is_busy: bool = False


class Leasing:
    """Grants the leases of one epoch.

    Attributes:
        hungry: ranks whose requests for batches were refused.
    """

    def __init__(
        self,
        ledger: EpochLedger,
        horizons: Mapping[int, int],
        epoch: int,
        now_s: float,
        most_ahead: int = MAX_AHEAD,
    ) -> None:
        self._most_ahead = most_ahead
        self._ledger = ledger
        self._epoch = epoch
        self._paces = {
            rank: _Pace(horizon, 0.0, now_s) for rank, horizon in horizons.items()
        }
        self._rate = 0.0
        self._begun_rate = self._begun_at = 0.0
        self._busy = 0
        self._by_end: list[_Entry] = []
        self._by_cost: list[_Entry] = []
        self._is_timed = False
        self.hungry: set[int] = set()

    @property
    def work_s(self) -> float:
        """Duration of pooled and leased work (s); 0.0 while speeds are not known."""
        work = self._ledger.pooled + self._ledger.total_leased
        return work / self._rate if self._is_timed else 0.0

    def set_costs(self, batch_s: Mapping[int, float]) -> None:
        """Sets the time (s) per batch of each rank; 0.0 if unknown."""
        known = [cost for cost in batch_s.values() if cost > 0]
        self._is_timed = bool(known)
        usual = sum(known) / len(known) if known else 0.0
        self._rate = self._begun_rate = self._begun_at = 0.0
        self._busy = 0
        self._by_end.clear()
        self._by_cost.clear()
        for rank, pace in self._paces.items():
            pace.batch_s = batch_s.get(rank, 0.0) or usual
            self._rate += 1.0 / (pace.batch_s or 1.0)
            pace.is_busy = False
            heap, entry = self._place(rank, pace)
            heap.append(entry)
        heapq.heapify(self._by_end)
        heapq.heapify(self._by_cost)

    def add(self, rank: int, horizon_batches: int) -> None:
        """Adds a rank, of average speed until it is measured."""
        self._paces[rank] = _Pace(horizon_batches, 0.0, 0.0)
        self.set_costs({r: p.batch_s for r, p in self._paces.items()})

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        self.hungry.discard(rank)
        if pace := self._paces.pop(rank, None):  # else the rank was idle
            self._forget(pace)
            self._rate = sum(1.0 / (p.batch_s or 1.0) for p in self._paces.values())

    def trained(self, rank: int, now_s: float) -> None:
        """Updates a rank's position after it reported trained batches."""
        if rank in self._paces:
            self._paces[rank].since_s = now_s
            self._moved(rank)

    def returned(self, rank: int) -> None:
        """Updates a rank's position after its leases returned to the pool."""
        if rank in self._paces:
            self._moved(rank)

    def first(self, ranks: Sequence[int], now_s: float) -> list[GrantBatches]:
        """Grants the epoch's first leases, one batch at a time in turn."""
        grants: list[GrantBatches] = []
        waiting = list(ranks)
        while waiting:
            given = [lease for r in waiting for lease in self.top_up(r, now_s, most=1)]
            waiting = [lease.rank for lease in given]
            grants += given
        return _joined(grants, self._lease_batches)

    def top_up(
        self, rank: int, now_s: float, most: int = MAX_AHEAD
    ) -> list[GrantBatches]:
        """Leases a rank the batches it lacks; marks it hungry if they are refused."""
        if rank not in self._paces:
            self.hungry.add(rank)
            return []
        self.hungry.discard(rank)
        pace = self._paces[rank]
        held = self._ledger.leased(rank)
        if not held:
            pace.since_s = now_s
        extra = self._extra(pace)
        wanted = pace.horizon_batches + 1 + extra - held
        if wanted < max(1, extra // 2) and held:
            return []
        grants = []
        wanted = min(wanted, most)
        whole = self._lease_batches(rank)
        while wanted > 0 and self._ledger.pooled:
            count = min(wanted, whole, self._in_time(rank, now_s))
            if count < 1:
                break
            start, stop = self._ledger.lease(rank, count)
            grants.append(
                GrantBatches(rank=rank, epoch=self._epoch, start=start, stop=stop)
            )
            wanted -= stop - start
            self._moved(rank)
        if wanted > 0:
            self.hungry.add(rank)
        return grants

    def feed_first(self, now_s: float) -> list[GrantBatches]:
        """Leases the next batch to the rank that would end it first, if hungry."""
        if not self.hungry or not self._ledger.pooled:
            return []
        earliest = self._earliest(now_s)
        return self.top_up(earliest, now_s) if earliest in self.hungry else []

    def _extra(self, pace: _Pace) -> int:
        """Returns the number of batches held beyond what the loader draws ahead."""
        if pace.batch_s <= 0:
            return 1
        lookahead_s = max(LOOKAHEAD_S, LOOKAHEAD_PER_RANK_S * len(self._paces))
        ahead = math.ceil(lookahead_s / pace.batch_s)
        return max(1, min(self._most_ahead, ahead))

    def _lease_batches(self, rank: int) -> int:
        """Returns the most batches of a lease: half of those that a rank holds.

        A rank reports a lease when it ends, and must then hold another lease.
        """
        pace = self._paces[rank]
        return max(1, (pace.horizon_batches + 1 + self._extra(pace)) // 2)

    def _in_time(self, rank: int, now_s: float) -> int:
        """Returns how many batches a rank can end by about the end of all work."""
        pace = self._paces[rank]
        batch_s = pace.batch_s or 1.0
        held = self._ledger.leased(rank)
        begun = 0.0
        if held and self._is_timed:
            begun = min(1.0, max(0.0, (now_s - pace.since_s) / batch_s))
        work = self._ledger.pooled + self._ledger.total_leased - self._begun(now_s)
        fits = math.floor(work / self._rate / batch_s + 0.5 - (held - begun) + 1e-9)
        return 1 if fits < 1 and self._earliest(now_s) == rank else fits

    def _begun(self, now_s: float) -> float:
        """Returns the finished part of the batches in progress, in batches."""
        if not self._is_timed:
            return 0.0
        begun = now_s * self._begun_rate - self._begun_at
        return min(float(self._busy), max(0.0, begun))

    def _earliest(self, now_s: float) -> int:
        """Returns the rank that would end another batch first; -1 without any."""
        busy, idle = self._top(self._by_end), self._top(self._by_cost)
        if busy is None or idle is None:
            return (busy or idle or (0.0, -1, 0))[1]
        return busy[1] if max(busy[0], now_s) <= now_s + idle[0] else idle[1]

    def _top(self, heap: list[_Entry]) -> _Entry | None:
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _push(self, heap: list[_Entry], entry: _Entry) -> None:
        """Pushes an entry; rebuilds the heap when most entries are stale."""
        heapq.heappush(heap, entry)
        if len(heap) > STALE_ENTRIES * (len(self._paces) + STALE_ENTRIES):
            heap[:] = [one for one in heap if self._is_current(one)]
            heapq.heapify(heap)

    def _is_current(self, entry: _Entry) -> bool:
        pace = self._paces.get(entry[1])
        return pace is not None and pace.version == entry[2]

    def _forget(self, pace: _Pace) -> None:
        if pace.is_busy:
            self._busy -= 1
            self._begun_rate -= pace.begun_rate
            self._begun_at -= pace.begun_at
            pace.is_busy = False

    def _moved(self, rank: int) -> None:
        """Updates the sums and heaps after a rank's work or speed has changed."""
        pace = self._paces[rank]
        self._forget(pace)
        self._push(*self._place(rank, pace))
        if not self._busy:
            self._begun_rate = self._begun_at = 0.0

    def _place(self, rank: int, pace: _Pace) -> tuple[list[_Entry], _Entry]:
        """Adds a rank's work to the sums; returns its heap and its entry there."""
        pace.version += 1
        batch_s = pace.batch_s or 1.0
        held = self._ledger.leased(rank)
        if not held:
            return self._by_cost, (batch_s, rank, pace.version)
        pace.is_busy = True
        pace.begun_rate = 1.0 / batch_s
        pace.begun_at = pace.since_s / batch_s
        self._busy += 1
        self._begun_rate += pace.begun_rate
        self._begun_at += pace.begun_at
        ends_s = pace.since_s + (held + 1) * batch_s
        return self._by_end, (ends_s, rank, pace.version)


def _joined(
    grants: Sequence[GrantBatches], most: Callable[[int], int]
) -> list[GrantBatches]:
    """Merges consecutive leases of a rank, up to the most batches of a lease."""
    joined: list[GrantBatches] = []
    for grant in grants:
        last = joined[-1] if joined else grant
        fits = grant.stop - last.start <= most(grant.rank)
        if (last.rank, last.stop) == (grant.rank, grant.start) and fits:
            joined[-1] = replace(last, stop=grant.stop)
        else:
            joined.append(grant)
    return joined
