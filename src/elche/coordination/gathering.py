"""Barriers of all ranks, and the end of an epoch. Pure."""

from __future__ import annotations

from collections.abc import Set

from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.protocol.events import BarrierReached, EpochOpened, Event, Left
from elche.coordination.protocol.instructions import BarrierPassed, Instruction

WELL_AFTER_S = 1.0
"""Delay (s) after a loop's end within which an uncaught exception is reported."""


class Barriers:
    """Ranks that wait at each barrier, and their texts."""

    def __init__(self) -> None:
        self._there: dict[str, dict[int, BarrierReached]] = {}

    def __bool__(self) -> bool:
        """True if any rank waits."""
        return bool(self._there)

    def reach(self, event: BarrierReached) -> None:
        """Records a rank's arrival at a barrier."""
        self._there.setdefault(event.name, {})[event.rank] = event

    def remove(self, rank: int) -> None:
        """Removes a lost rank from all barriers."""
        for there in self._there.values():
            there.pop(rank, None)

    def passed(self, members: Set[int]) -> list[Instruction]:
        """Releases barriers that all members have reached, with the first rank's text.

        Raises:
            MismatchError: the ranks' models differ.
        """
        replies: list[Instruction] = []
        for name, there in [*self._there.items()]:
            first = there.get(min(members))
            if first is None or first.text is None or not there.keys() >= members:
                continue
            checks = {r: each.checks for r, each in self._there.pop(name).items()}
            ModelChecks(f"at {name}").compare(checks)
            replies += [
                BarrierPassed(rank=r, name=name, text=first.text)
                for r in sorted(members)
            ]
        return replies

    def waiting_for(self, members: Set[int]) -> str:
        """Names the ranks missing at the first barrier."""
        name, there = next(iter(self._there.items()))
        return f"ranks {sorted(members - there.keys())} at barrier {name!r}"


class EpochEnding:
    """Ends an epoch on staying ranks only once the leaving ranks are known to live.

    At first a loop that breaks is indistinguishable from one that raises. The rank's
    next message shows the difference, as do ``WELL_AFTER_S`` seconds without a failure.

    Attributes:
        held: instructions that are held back.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._unconfirmed: set[int] = set()
        self.held: list[Instruction] = []

    def end(
        self, due: list[Instruction], left: set[int], members: Set[int], now_s: float
    ) -> list[Instruction]:
        """Holds an epoch's end back from ranks not in ``left``; returns the rest."""
        if not left or left == members:
            return due
        self._unconfirmed, self._since_s = left, now_s
        self.held = [one for one in due if one.rank not in left]
        return [one for one in due if one.rank in left]

    def release_on(self, event: Event) -> list[Instruction]:
        """Releases held instructions once every rank that left has reported again."""
        if self.held and isinstance(event, (EpochOpened, BarrierReached, Left)):
            return self.confirm(event.rank)
        return []

    def release(self, now_s: float) -> list[Instruction]:
        """Releases held instructions once their delay is over."""
        if not self.held or now_s - self._since_s < WELL_AFTER_S:
            return []
        self._unconfirmed = set()
        return self.confirm(-1)

    def confirm(self, rank: int) -> list[Instruction]:
        """Notes that a rank lives or is lost; the last one releases instructions."""
        self._unconfirmed.discard(rank)
        if self._unconfirmed:
            return []
        held, self.held = self.held, []
        return held
