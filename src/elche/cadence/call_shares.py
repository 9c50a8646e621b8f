"""Shares of n samples in loops without a loader, from the time between calls.

Every rank computes the same split from the same reports, which travel with the loop's
own gradient reductions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import final

from elche.cadence.balancer import Balancer
from elche.cadence.throughput import check_int
from elche.errors import ProtocolError

FACTS = 3
"""Numbers that a rank reports: samples and busy time (s) of a call, call digest."""

Facts = tuple[float, float, float]


@final
class CallShares:
    """Splits n samples by delivered speed, measured between calls.

    Args:
        rank: this rank.
        world_size: number of ranks.
        least_s: least time (s) of a part of so many samples, on an emulated device.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        least_s: Callable[[int], float] | None = None,
    ) -> None:
        self.place = rank, world_size
        self._least_s = least_s
        self._balancer = Balancer(world_size)
        self._digest = 0
        self._part: int | None = None
        self._began_s = self._waited_s = 0.0
        self._calls = self._samples = 0
        self._busy_s = 0.0

    @property
    def due_s(self) -> float:
        """Earliest time (s) at which the device can have trained the current part."""
        least_s = self._least_s(self._part) if self._least_s and self._part else 0.0
        return self._began_s + self._waited_s + least_s

    def split(self, samples: int, now_s: float) -> range:
        """Ends the measurement of the last part, and returns this rank's next part.

        Args:
            samples: samples of all ranks together; the same on every rank.
            now_s: current time (s).

        Raises:
            ConfigError: ``samples`` is not a whole number of at least 1.
        """
        total = check_int("n", samples, 1)
        if self._part is not None:
            self._calls += 1
            self._samples += self._part
            self._busy_s += max(0.0, now_s - self._began_s - self._waited_s)
        self._began_s, self._waited_s = now_s, 0.0
        self._digest = zlib.crc32(str(total).encode(), self._digest)
        rank, _ = self.place
        sizes = self._balancer.sizes(total)
        self._part = sizes[rank]
        start = sum(sizes[:rank])
        return range(start, start + self._part)

    def exclude_wait(self, waited_s: float) -> None:
        """Excludes time spent waiting for other ranks from the current call's time."""
        self._waited_s += waited_s

    def facts(self) -> Facts:
        """Returns this rank's means per call since its last report, and the digest."""
        calls = max(1, self._calls)
        means = self._samples / calls, self._busy_s / calls
        self._calls = self._samples = 0
        self._busy_s = 0.0
        return *means, float(self._digest)

    def report(self, rows: Sequence[Sequence[float]]) -> None:
        """Records the facts of all ranks.

        Args:
            rows: facts by rank, the same on every rank. Rows of a group of another size
                are ignored.

        Raises:
            ProtocolError: ranks called with different numbers, or not equally often.
        """
        if len(rows) != self.place[1]:
            return
        samples, busy_s, digests = zip(*rows, strict=True)
        if len(set(digests)) > 1:
            raise ProtocolError(
                "ranks called elche.share with different n, or not equally often, so "
                "their parts do not fit together; call it with the same n, equally "
                "often, on every rank"
            )
        self._balancer.report([round(each) for each in samples], busy_s)
