"""State of a run: samples, rate, efficiency, time left, a line per rank. Pure.

Derived from messages between ranks and coordinator, in the launcher's process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from elche.coordination.accounts.metrics import Metrics, WindowMetrics
from elche.coordination.protocol.events import Event, Join
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    EndEpoch,
    Instruction,
    MetricsReported,
)

RECENT_S = 5.0
BAR_CELLS = 24
RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """State of one rank; None for values not known yet.

    Attributes:
        rank: the rank.
        device: the device's name.
        memory_bytes: memory of the device; 0 if unknown.
        samples_per_s: throughput outside of synchronisations.
        share: fraction of the samples.
        waiting: fraction of time in synchronisations: waiting and reducing.
    """

    rank: int
    device: str
    memory_bytes: int = 0
    samples_per_s: float | None = None
    share: float | None = None
    waiting: float | None = None


def rank_table(lines: Sequence[RankLine]) -> list[str]:
    """Table of ranks as aligned text with a heading; only the first ranks of many."""
    shown = lines[:RANKS_SHOWN]
    columns = [
        ("rank", ">", [str(line.rank) for line in shown]),
        ("device", "<", [line.device for line in shown]),
        ("memory", ">", [f"{line.memory_bytes / 1e9:.1f} GB" for line in shown]),
        ("samples/s", ">", [_cell(line.samples_per_s, ",.0f") for line in shown]),
        ("share", ">", [_cell(line.share, ".0%") for line in shown]),
        ("waiting", ">", [_cell(line.waiting, ".0%") for line in shown]),
    ]
    if not any(line.memory_bytes for line in shown):
        del columns[2]
    more = len(lines) - len(shown)
    rows = [f"  {row}" for row in aligned(columns)]
    return [*rows, *([f"  and {more} more"] if more else [])]


def aligned(columns: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Formats a table; each column has a heading, an alignment (< or >), and cells."""
    padded = [
        [
            f"{cell:{side}{max(map(len, (heading, *cells)))}}"
            for cell in (heading, *cells)
        ]
        for heading, side, cells in columns
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def waiting_parts(
    busy_s: Sequence[float], sync_wait_s: Sequence[float]
) -> tuple[float, ...]:
    """Fraction of each rank's time spent in synchronisations."""
    return tuple(
        wait / (busy + wait) if busy + wait > 0 else 0.0
        for busy, wait in zip(busy_s, sync_wait_s, strict=True)
    )


class RunView:
    """Tracks a run by its messages.

    Rates cover the last seconds, or the last window if that is longer. A rank's own
    speed is its latest throughput outside of synchronisations; efficiency is the run's
    rate over the sum of these speeds.
    """

    def __init__(self) -> None:
        self._devices: dict[int, str] = {}
        self._speeds: dict[int, float] = {}
        self._recent: deque[WindowMetrics] = deque()
        self._epoch, self._policy = -1, ""
        self._samples = self._total = 0
        self.is_training = False

    def see(self, message: Event | Instruction) -> None:
        """Updates the view by a message; call in the order of sending and receiving."""
        if isinstance(message, Join):
            self._devices[message.rank] = message.device
        elif isinstance(message, BeginEpoch):
            if message.epoch != self._epoch or not self.is_training:
                self._samples = 0
                self._total = sum(size * count for size, count in message.sizes)
            self._epoch, self._policy = message.epoch, message.policy
            self.is_training = True
        elif isinstance(message, EndEpoch):
            self.is_training = False
        elif isinstance(message, MetricsReported) and message.window >= 0:
            self._take(WindowMetrics.from_json(message.values))

    @property
    def samples_per_s(self) -> float:
        """Recent throughput of the run; 0 if unknown."""
        return self._lately().samples_per_s

    @property
    def efficiency(self) -> float:
        """The run's rate over the sum of the ranks' own speeds; 0 if unknown."""
        most = math.fsum(self._speeds.values())
        return self.samples_per_s / most if most > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the end of the epoch; None if unknown."""
        rate = self.samples_per_s
        left = max(0, self._total - self._samples)
        return left / rate if rate > 0 else None

    def lines(self) -> list[str]:
        """Lines to display: one for the run, and the table of its ranks."""
        done = min(1.0, self._samples / self._total) if self._total else 0.0
        full = round(done * BAR_CELLS)
        bar = "━" * full + "╌" * (BAR_CELLS - full)
        head = (
            f"epoch {self._epoch} ({self._policy})  {bar}"
            f"  {self._samples:,} of {self._total:,} samples"
        )
        left_s = self.left_s
        if left_s is not None:
            head += (
                f"  {self.samples_per_s:,.0f}/s, {self.efficiency:.0%} of what the "
                "devices deliver"
            )
        if left_s is not None and self.is_training:
            head += f", {_clock(left_s)} left"
        return [head, *rank_table(self._rank_lines())]

    def _take(self, window: WindowMetrics) -> None:
        self._samples += window.samples
        self._recent.append(window)
        recent_s = math.fsum(each.duration_s for each in self._recent)
        while recent_s - self._recent[0].duration_s >= RECENT_S:
            recent_s -= self._recent.popleft().duration_s
        for rank, speed in enumerate(self._lately().rank_samples_per_s):
            if speed > 0:
                self._speeds[rank] = speed

    def _lately(self) -> Metrics:
        """Metrics of the recent windows combined."""

        def summed(name: str) -> tuple[Any, ...]:
            by_window = (getattr(window, name) for window in self._recent)
            return tuple(map(sum, zip_longest(*by_window, fillvalue=0)))

        return Metrics(
            epoch=self._epoch,
            synchronisations=len(self._recent),
            duration_s=math.fsum(window.duration_s for window in self._recent),
            rank_samples=summed("rank_samples"),
            discarded_samples=summed("discarded_samples"),
            busy_s=summed("busy_s"),
            data_wait_s=summed("data_wait_s"),
            transfer_s=summed("transfer_s"),
            sync_wait_s=summed("sync_wait_s"),
        )

    def _rank_lines(self) -> list[RankLine]:
        lately = self._lately()
        shares = lately.shares
        waiting = waiting_parts(lately.busy_s, lately.sync_wait_s)
        return [
            RankLine(
                rank=rank,
                device=device,
                samples_per_s=self._speeds.get(rank),
                share=shares[rank] if rank < len(shares) else None,
                waiting=waiting[rank] if rank < len(waiting) else None,
            )
            for rank, device in sorted(self._devices.items())
        ]


def _clock(seconds: float) -> str:
    """Formats seconds like 0:05 and 2:03:04."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
