"""Which batches left what a rank has learned no number, and what is taken back of them.

Whether a window's contribution is a number is asked once, at its end: asking after
every batch would wait for the device. Where it is none, any of its batches may be at
fault. They are leased again as *suspects*, and from the first suspect of a window on,
or from its first batch where the rank's last window was spoilt, whoever trains on them
asks after every batch. It keeps what it has learned where no gradient waits for a step;
a batch that leaves no number takes the rank back there, and it goes on. Batches whose
gradients were to make one step stand or fall together, also those of earlier windows,
which count already: they are *lost*, and given back as well. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, final

from elche.coordination.messages import Runs


class Learned(Protocol):
    """What a rank has learned in a window, on the rank itself."""

    @property
    def is_finite(self) -> bool:
        """Whether it is numbers; waits for the device."""

    @property
    def has_finite_gradients(self) -> bool:
        """Whether gradients that are left for a later step are; waits."""

    @property
    def has_stepped(self) -> bool:
        """Whether the last batch brought a step, so that no gradient waits for one."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for later steps, and no GradScaler skips those."""

    def keep(self) -> None:
        """Remembers it as it is; gradients are not part of it."""

    def restore(self, batches: int) -> None:
        """Makes it what was kept; so many batches are not in it, nor in gradients."""

    def drop_gradients(self, batches: int) -> None:
        """Forgets gradients that wait for a step; they were of so many batches."""

    def forget(self) -> None:
        """Nothing is kept any more."""


@final
class Suspects:
    """Looks for batches that are at fault, in one epoch of one rank.

    Args:
        learned: what the rank has learned.
    """

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._batches: set[int] = set()
        self._watches = self._is_wary = self._is_lost = False
        self._must_keep = False
        self._waiting: list[int] = []
        self._carried: list[int] = []  # of earlier windows, and wait for a step
        self._applied: list[int] = []  # of earlier windows, in a step of this one
        self._lost: list[int] = []
        self._since: int | None = None
        self._culprits: list[int] = []
        self._rejected: list[int] = []

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Batches that are leased with the word that they are suspect."""
        for start, stop in ranges:
            self._batches.update(range(start, stop))

    def adopted(self) -> None:
        """A mean has come into what was learned: what was kept is without it."""
        self._must_keep = True

    def begin(self, batch: int) -> None:
        """A loop body begins on this batch."""
        is_due = self._is_wary or batch in self._batches
        if is_due and not (self._watches or self._is_lost):
            # What the window's earlier batches broke is no suspect's fault.
            self._is_lost = not self._learned.is_finite
            self._watches = self._must_keep = not self._is_lost
            if self._watches:
                self._drop_waiting()
        if self._watches and (self._must_keep or not self._waiting):
            self._learned.keep()
            self._must_keep = False

    def done(self, batch: int) -> None:
        """The loop body has run.

        A gradient may wait in ``p.grad`` for the loop's next step: then the batch that
        left it there is at fault, not the one with the step.
        """
        learned = self._learned
        self._waiting.append(batch)
        if self._watches:
            if not learned.is_finite:
                learned.restore(len(self._waiting))
                self._reject(batch if self._since is None else self._since)
                return
            if learned.has_finite_gradients:
                self._since = None
            elif self._since is None:
                self._since = batch
        if learned.has_stepped:
            self._waiting.clear()
            self._applied += self._carried
            self._carried = []

    def window_ends(self) -> tuple[tuple[int, ...], Runs]:
        """Batches at fault, and all that are not in what the rank has learned.

        Before that is looked at as a whole.
        """
        if not self._is_lost:
            self._drop_waiting()
        culprits, rejected = tuple(self._culprits), joined(sorted(self._rejected))
        self._culprits, self._rejected = [], []
        self._since = None
        self._watches = self._is_lost = False
        self._is_wary = bool(rejected)
        return culprits, rejected

    def closed(self, *, is_finite: bool) -> Runs:
        """The window has been looked at as a whole.

        Returns:
            Batches of earlier windows that are in no step, and will not be.
        """
        lost, self._lost = self._lost, []
        if not is_finite:
            lost += [*self._applied, *self._carried]
            self._carried = []
        elif self._waiting or self._carried:
            waits = self._learned.accumulates
            self._carried = [*self._carried, *self._waiting] if waits else []
        self._applied, self._waiting = [], []
        self._is_wary |= not is_finite
        if not self._is_wary:
            self._learned.forget()
        return joined(sorted(lost))

    def _drop_waiting(self) -> None:
        """Gradients that wait for a step would spoil what comes after them."""
        learned = self._learned
        if self._waiting and learned.accumulates and not learned.has_finite_gradients:
            learned.drop_gradients(len(self._waiting))
            self._reject(self._since)

    def _reject(self, culprit: int | None) -> None:
        self._rejected += self._waiting
        self._lost += self._carried
        self._carried = []
        if culprit is not None:
            self._culprits.append(culprit)
        self._waiting, self._since = [], None


def joined(batches: Iterable[int]) -> Runs:
    """Batches in order, as ranges."""
    ranges: list[tuple[int, int]] = []
    for batch in batches:
        if ranges and ranges[-1][1] == batch:
            ranges[-1] = ranges[-1][0], batch + 1
        else:
            ranges.append((batch, batch + 1))
    return tuple(ranges)
