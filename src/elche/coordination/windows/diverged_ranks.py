"""Ranks whose last update was not finite, and the batches of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elche.coordination.accounts.batch_ranges import Range


class DivergedRanks:
    """Ranks that are *diverged*: from a discarded update to the next finite one."""

    def __init__(self) -> None:
        self._batches: dict[int, list[Range]] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._batches

    def begin_epoch(self) -> None:
        """Batches of the last epoch say nothing in this one."""
        self._batches = {rank: [] for rank in self._batches}

    def discard(self, rank: int, trained: Iterable[Range]) -> tuple[list[Range], bool]:
        """A rank's update is discarded: it is diverged.

        Returns:
            The batches since its last finite update, and whether it was diverged.
        """
        was_diverged = rank in self._batches
        batches = self._batches.setdefault(rank, [])
        batches += trained
        return batches, was_diverged

    def trained(self, rank: int, trained: Iterable[Range], *, has_moved: bool) -> None:
        """A rank brings a finite update, and is diverged no more.

        Unless it has not moved: its gradients wait for a step, of which nothing is
        known yet.
        """
        if has_moved:
            self._batches.pop(rank, None)
        elif rank in self._batches:
            self._batches[rank] += trained

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        self._batches.pop(rank, None)
