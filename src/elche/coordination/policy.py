"""What the coordinator and its policies share. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from elche.coordination.ledger import BatchSizes
from elche.coordination.messages import EndEpoch, Event, Instruction


@dataclass(slots=True)
class EpochTotals:
    """What the ranks did in an epoch, for the report at its end."""

    samples: list[int]
    busy_s: list[float]
    data_wait_s: list[float]
    sync_s: float = 0.0
    windows: int = 0

    @staticmethod
    def zeros(world_size: int) -> EpochTotals:
        """Totals of an epoch that has not begun."""
        return EpochTotals([0] * world_size, [0.0] * world_size, [0.0] * world_size)

    def add(self, rank: int, samples: int, busy_s: float, data_wait_s: float) -> None:
        """Counts work that a rank reported."""
        self.samples[rank] += samples
        self.busy_s[rank] += busy_s
        self.data_wait_s[rank] += data_wait_s

    def end_epoch(
        self, epoch: int, anchor: int, shares: Sequence[float]
    ) -> list[Instruction]:
        """The same report to every rank."""
        return [
            EndEpoch(
                rank=rank,
                epoch=epoch,
                samples=tuple(self.samples),
                busy_s=tuple(self.busy_s),
                data_wait_s=tuple(self.data_wait_s),
                sync_s=self.sync_s,
                windows=self.windows,
                anchor=anchor,
                shares=tuple(shares),
            )
            for rank in range(len(self.samples))
        ]


@dataclass(frozen=True, slots=True)
class Member:
    """A rank as it presented itself."""

    rank: int
    device: str
    horizon_batches: int


@dataclass(slots=True)
class Outcome:
    """What a policy answers: instructions, and whether the epoch is over."""

    instructions: list[Instruction] = field(default_factory=list)
    epoch_over: bool = False


class Policy(ABC):
    """When the ranks of one run come together, and who trains on what."""

    @abstractmethod
    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch that all ranks have opened."""

    @abstractmethod
    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event of the epoch under way."""

    @abstractmethod
    def check(self) -> None:
        """Asserts the invariants of the epoch under way."""

    def patience_s(self) -> float:
        """How long the run may be silent now; shorter once ranks have fallen apart."""
        return math.inf

    def has_left(self, rank: int) -> bool:
        """Whether a rank's loop has left the epoch early."""
        return False

    def owes(self, rank: int) -> bool:
        """Whether the epoch under way cannot end without a rank."""
        return True

    @abstractmethod
    def waiting_for(self) -> str:
        """Whom the run waits for now, in words."""
