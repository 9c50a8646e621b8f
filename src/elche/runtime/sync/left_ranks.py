"""Ranks whose loop has left an epoch of ``sync``, for one that goes on in it."""

from __future__ import annotations

from typing import final

from elche.comm.gradients.part_weights import Lost
from elche.coordination.protocol.events import PassBegun
from elche.coordination.protocol.instructions import RankLeft
from elche.runtime.process.worker import Worker
from elche.runtime.sync.step import Step


@final
class LeftRanks:
    """Weight missing from ranks that left the epoch, and our acknowledgement to them.

    Args:
        worker: this rank's shell.
        epoch: the epoch.

    Attributes:
        passes: that each has come to; {} while none has left.
    """

    def __init__(self, worker: Worker, epoch: int) -> None:
        self._worker = worker
        self._epoch = epoch
        self.passes: dict[int, int] = {}
        self._announced: PassBegun | None = None

    def add(self, gone: RankLeft) -> None:
        """One has left; may be called again and again."""
        self.passes[gone.gone] = gone.passes

    def announce(self, step: int, passes: int) -> None:
        """Says how far this rank is, for those that have left to join it.

        Args:
            step: which its loop was given last.
            passes: backward passes of the run so far.
        """
        begun = PassBegun(
            rank=self._worker.rank,
            epoch=self._epoch,
            step=step + 1,
            passes=passes,
            gone=len(self.passes),
        )
        if begun != self._announced:
            self._announced = begun
            self._worker.send(begun)

    def lost(self, step: Step, number: int) -> Lost:
        """Weight missing from a pass of a step."""
        shares, left = step.shares, self.passes.items()
        lost = [shares[rank] for rank, passes in left if passes < number]
        ranks = sum(share > 0 for share in lost)
        active = sum(share > 0 for share in shares)
        return Lost(sum(lost) / sum(shares), ranks / active)
