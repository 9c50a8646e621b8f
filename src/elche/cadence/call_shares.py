"""Shares of n samples in loops without a loader, from the time between calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import final

from elche.cadence.balancer import Balancer
from elche.cadence.throughput import check_int
from elche.errors import ProtocolError

FACTS = 3
"""Numbers that a rank reports: samples and busy time (s) of a call, call digest."""


@final
class CallShares:
    """Splits n samples by delivered speed; equal reports give equal splits."""

    least_s: Callable[[int], float] | None = None
    """Least time (s) of a part of so many samples, on an emulated device."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.place = rank, world_size
        self._balancer = Balancer(world_size)
        self._digest = 0
        self._part = 0
        self._began_s = self._waited_s = 0.0
        self._ended = 0, 0, 0.0
        """Parts that ended since the last report: count, samples, busy time (s)."""
        self.is_unequal = False
        """True if the last split's parts differ, which only weights make exact."""

    @property
    def due_s(self) -> float:
        """Earliest time (s) at which the device can have trained the current part."""
        least_s = 0.0 if self.least_s is None else self.least_s(self._part)
        return self._began_s + self._waited_s + least_s

    def split(self, samples: int, now_s: float) -> range:
        """Ends the last part, and returns this rank's part of ``samples`` samples.

        Raises:
            ConfigError: ``samples`` is not a whole number of at least 1.
        """
        sizes = self._balancer.sizes(check_int("n", samples, 1))
        if self._digest:
            busy_s = max(0.0, now_s - self._began_s - self._waited_s)
            count, done, spent_s = self._ended
            self._ended = count + 1, done + self._part, spent_s + busy_s
        self._began_s, self._waited_s = now_s, 0.0
        self.is_unequal = len(set(sizes)) > 1
        self._digest = zlib.crc32(repr(sizes).encode(), self._digest)
        rank, _ = self.place
        self._part, start = sizes[rank], sum(sizes[:rank])
        return range(start, start + self._part)

    def exclude_wait(self, waited_s: float) -> None:
        """Excludes time spent waiting for other ranks from the current part's time."""
        self._waited_s += waited_s

    def facts(self) -> tuple[float, float, float]:
        """Returns this rank's means per call since its last report, and the digest."""
        (count, samples, busy_s), self._ended = self._ended, (0, 0, 0.0)
        return samples / (count or 1), busy_s / (count or 1), float(self._digest)

    def report(self, rows: Sequence[Sequence[float]]) -> None:
        """Records the facts of all ranks; facts of another group are only compared.

        Raises:
            ProtocolError: ranks called with different numbers, or not equally often.
        """
        samples, busy_s, digests = zip(*rows, strict=True)
        if len(set(digests)) > 1:
            text = "ranks called elche.share with different n, or not equally often"
            raise ProtocolError(f"{text}; call it alike on every rank")
        if len(rows) == self.place[1]:
            self._balancer.report([round(each) for each in samples], busy_s)
