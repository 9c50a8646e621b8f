"""Interface between the coordinator and its policies. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from elche.coordination.accounts.batch_ranges import WHOLE_BATCHES, BatchSizes
from elche.coordination.accounts.metrics import MetricsBook, RankReport
from elche.coordination.fatal_losses import LossLimits
from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import (
    EndEpoch,
    Instruction,
    MetricsReported,
)
from elche.coordination.protocol.messages import Runs

Steps: TypeAlias = Iterator[Instruction]
"""Instructions, each decided when it is requested; exhaust the iterator before the
next decision.
"""

TABLE_RANKS = 64
"""Most ranks of which all receive metrics per rank; beyond it, all but the first
receive totals. Tables for 10,000 ranks would take 3 GB at every epoch's end.
"""


class EpochTotals:
    """Sums of the ranks' work in an epoch, for its reports."""

    def __init__(self, epoch: int, world_size: int, now_s: float) -> None:
        self._epoch = epoch
        self._book = MetricsBook(world_size, epoch, now_s)
        self.sync_s = 0.0
        self.windows = 0
        self._before: MetricsBook | None = None

    def follow(self, before: EpochTotals) -> None:
        """Continues an earlier part of the same epoch, so that metrics cover both."""
        self._before = before._book

    def add(self, window: int, report: RankReport) -> None:
        """Adds work that a rank reported."""
        self._book.add(window, report)

    @property
    def samples(self) -> int:
        """Samples counted so far, without discarded ones."""
        return self._book.samples

    def discard(self, window: int, rank: int, samples: int) -> None:
        """Moves counted samples to the discarded ones: they are in no model."""
        if samples:
            report = RankReport(rank=rank, samples=-samples, discarded_samples=samples)
            self.add(window, report)

    def close_window(
        self, window: int, now_s: float, reader: int, sync_s: float, count: int = 1
    ) -> MetricsReported:
        """Closes a window; returns its metrics for the rank ``reader``.

        Its ``count`` synchronisations took ``sync_s`` seconds.
        """
        self.sync_s += sync_s
        self.windows += count
        values = self._book.close_window(window, now_s, count).to_json()
        return MetricsReported(
            rank=reader, epoch=self._epoch, window=window, values=values
        )

    def end_epoch(
        self, ranks: Sequence[int], now_s: float, anchor: int
    ) -> Iterator[Instruction]:
        """Yields the epoch's metrics (or totals, see `TABLE_RANKS`) and its end."""
        samples, metrics = self.samples, self._book.end_epoch(now_s, self._before)
        is_large = len(metrics.rank_samples) > TABLE_RANKS
        whole = metrics.to_json()
        small = metrics.totals().to_json() if is_large else whole
        first = min(ranks)
        for rank in ranks:
            values = whole if rank == first else small
            yield MetricsReported(
                rank=rank, epoch=self._epoch, window=-1, values=values
            )
        for rank in ranks:
            yield EndEpoch(
                rank=rank,
                epoch=self._epoch,
                samples=samples,
                sync_s=self.sync_s,
                windows=self.windows,
                anchor=anchor,
            )


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, with the facts from its `Join`."""

    rank: int
    device: str
    horizon_batches: int


@dataclass(slots=True)
class Outcome:
    """A policy's result: instructions, whether the epoch is over, and notes."""

    instructions: list[Instruction] = field(default_factory=list)
    epoch_over: bool = False
    notes: list[str] = field(default_factory=list)


class Policy(ABC):
    """Decides when ranks synchronise, and which rank trains on which batches."""

    name = "sync"
    """Name of the policy in force."""
    cut = WHOLE_BATCHES
    """Cut of the epoch's batches."""
    is_cut = False
    """True if the policy itself ended the epoch before all was trained."""

    def make_room(self, wanted: bool) -> list[Instruction]:
        """Stops granting work while newcomers wait (``wanted``), and resumes after."""
        return []

    @property
    def first_window(self) -> int:
        """Number of the next window."""
        return 0

    @property
    @abstractmethod
    def totals(self) -> EpochTotals:
        """Totals of the current epoch, or the last one."""

    @property
    @abstractmethod
    def positions_left(self) -> Runs:
        """Untrained positions of an epoch that was cut or left early."""

    @property
    def loss_limits(self) -> LossLimits:
        """Losses of ranks that would end the run now."""
        return LossLimits()

    @property
    def is_outdated(self) -> bool:
        """True if batches were cut for other ranks than the present ones."""
        return False

    @property
    def steps_left(self) -> int:
        """Number of global batches for the rest; 0: batches stay as they were."""
        return 0

    @abstractmethod
    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch that all ranks have opened."""

    @abstractmethod
    def handle(self, event: Event, now_s: float) -> Outcome:
        """Handles an event of the current epoch."""

    @abstractmethod
    def check(self) -> None:
        """Asserts the invariants of the current epoch."""

    @abstractmethod
    def remove(self, rank: int) -> None:
        """Removes a lost rank; starts nothing until :meth:`regrouped`."""

    @abstractmethod
    def add(self, member: Member) -> None:
        """Adds a rank before an epoch, or the rest of one, begins."""

    def arrived(self, rank: int, lost: Runs) -> None:  # noqa: B027
        """Notes a member of the new group before :meth:`regrouped`; see `Regrouped`."""

    @abstractmethod
    def regrouped(self, reduced: Mapping[int, int], now_s: float) -> Outcome:
        """Resumes after the members' regroup; ``reduced``: results that they hold."""

    @abstractmethod
    def has_left(self, rank: int) -> bool:
        """True if a rank's loop has left the epoch early."""

    @abstractmethod
    def waiting_for(self) -> str:
        """Names the ranks that the run waits for now."""


class PolicyChooser:
    """Owner of a run's policy; this class keeps the given policy throughout.

    Args:
        policy: policy that decides inside the epochs.

    Attributes:
        policy: the policy in force.
        state_from: rank whose optimizer state all ranks copy before the epoch; None if
            each has its own.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state_from: int | None = None

    @property
    def loss_limits(self) -> LossLimits:
        """Losses of ranks that the policy does not survive now."""
        return self.policy.loss_limits

    def prepare(self, sync_s: float, now_s: float, *, alike: bool) -> None:
        """May change the policy for the next epoch, or for the rest of one.

        ``sync_s`` is the measured time (s) of a reduction, or 0.0; ``alike``: all
        ranks' optimizers would take the same step.
        """

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch, or the rest of one, under the policy in force."""
        return self.policy.begin_epoch(epoch, sizes, now_s)

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        self.policy.remove(rank)

    def add(self, member: Member) -> None:
        """Adds a rank before an epoch, or the rest of one, begins."""
        self.policy.add(member)
