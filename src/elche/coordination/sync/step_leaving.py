"""Early exits from an epoch of ``sync``: at the same step on every rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from elche.coordination.protocol.events import EpochLeft
from elche.errors import ProtocolError


@final
class EarlyEnd:
    """Who has left the epoch under way, and after which step.

    Args:
        policy: as the user has set it.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._left: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether anybody has left."""
        return bool(self._left)

    def __contains__(self, rank: int) -> bool:
        """Whether this rank has."""
        return rank in self._left

    @property
    def under(self) -> str:
        """The policy in words, and why its steps are common where it is ``auto``."""
        if self._policy == "auto":
            return (
                "under policy 'auto', which trains in common steps, as 'sync' does, "
                "until it has chosen windows,"
            )
        return f"under policy {self._policy!r}"

    def clear(self) -> None:
        """Begins an epoch."""
        self._left.clear()

    def has_all(self, members: Iterable[int]) -> bool:
        """Whether all of them have left."""
        return self._left.keys() >= set(members)

    def take(self, event: EpochLeft) -> None:
        """A rank leaves.

        Raises:
            ProtocolError: another one has left after another step.
        """
        self._left[event.rank] = event.step
        if len(set(self._left.values())) > 1:
            raise ProtocolError(
                f"{self.under} a loop may only be left at the same step on every rank, "
                f"but the ranks left after steps {self._left}; decide the break from "
                "values that all ranks share"
            )

    def waiting_for(self, members: Iterable[int], epoch: int) -> str:
        """Who has not left, in words."""
        others = sorted(set(members) - self._left.keys())
        return (
            f"ranks {others} to leave epoch {epoch}, as ranks {sorted(self._left)} did "
            f"after step {min(self._left.values())}; {self.under} a loop must be left "
            "at the same step on every rank"
        )
