"""Barriers of all ranks, and the end of an epoch. Pure."""

from __future__ import annotations

from collections.abc import Set

from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.protocol.events import BarrierReached, EpochOpened, Event, Left
from elche.coordination.protocol.instructions import BarrierPassed, Instruction

WELL_AFTER_S = 1.0
"""Time (s) after a loop's end by which an uncaught exception is reported."""


class Barriers:
    """Ranks that wait at each barrier, and their texts."""

    def __init__(self) -> None:
        self._there: dict[str, dict[int, BarrierReached]] = {}

    def __bool__(self) -> bool:
        """True if anybody waits."""
        return bool(self._there)

    def reach(self, event: BarrierReached) -> None:
        """A rank has come."""
        self._there.setdefault(event.name, {})[event.rank] = event

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        for there in self._there.values():
            there.pop(rank, None)

    def passed(self, members: Set[int]) -> list[Instruction]:
        """Lets all pass where all members have come, with the first one's text.

        Raises:
            MismatchError: their models differ.
        """
        told: list[Instruction] = []
        for name, there in [*self._there.items()]:
            first = there.get(min(members))
            if first is None or first.text is None or not there.keys() >= members:
                continue
            checks = {r: each.checks for r, each in self._there.pop(name).items()}
            ModelChecks(f"at {name}").compare(checks)
            told += [
                BarrierPassed(rank=r, name=name, text=first.text)
                for r in sorted(members)
            ]
        return told

    def waiting_for(self, members: Set[int]) -> str:
        """Ranks that are missing at the first collective, in words."""
        name, there = next(iter(self._there.items()))
        return f"ranks {sorted(members - there.keys())} at barrier {name!r}"


class EpochEnding:
    """Ends an epoch on ranks that did not leave it only when the others are well.

    A loop that breaks and a loop that raises look alike at first. The rank's next
    message tells them apart, or ``WELL_AFTER_S`` without a failure.

    Attributes:
        held: instructions that ranks have not received yet.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._unconfirmed: set[int] = set()
        self.held: list[Instruction] = []

    def end(
        self, told: list[Instruction], left: set[int], members: Set[int], now_s: float
    ) -> list[Instruction]:
        """Holds an epoch's end back from ranks not in ``left``; returns the rest."""
        if not left or left == members:
            return told
        self._unconfirmed, self._since_s = left, now_s
        self.held = [one for one in told if one.rank not in left]
        return [one for one in told if one.rank in left]

    def heard(self, event: Event) -> list[Instruction]:
        """Held back instructions, once every rank that left has reported again."""
        if self.held and isinstance(event, (EpochOpened, BarrierReached, Left)):
            return self.confirm(event.rank)
        return []

    def release(self, now_s: float) -> list[Instruction]:
        """Held back instructions, once their delay is over."""
        if not self.held or now_s - self._since_s < WELL_AFTER_S:
            return []
        self._unconfirmed = set()
        return self.confirm(-1)

    def confirm(self, rank: int) -> list[Instruction]:
        """A rank is well, or gone; what was held back if it was the last."""
        self._unconfirmed.discard(rank)
        if self._unconfirmed:
            return []
        held, self.held = self.held, []
        return held
