"""Ranks of ``sync`` that lack the model, and how they take it over. Pure.

A rank that is left out of steps falls behind, and loops may leave an epoch after
different steps. All take the model over from one that has it, at a point at which none
runs a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import final

from elche.coordination.protocol.events import ModelUpdated
from elche.coordination.protocol.instructions import Adopt
from elche.errors import ProtocolError


@final
class ModelHandover:
    """Ranks that lack the model in an epoch and have yet to adopt it.

    Args:
        epoch: which; all that begin it hold the same model.

    Attributes:
        adopting: members that take it over now, or run the steps that they have begun.
        ready: members that have done so while another group formed.
        is_told: all were told, and none was left out since.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.adopting: set[int] = set()
        self.ready: set[int] = set()
        self._behind: set[int] = set()
        self.is_told = False

    def lacking(self, left_out: Iterable[int]) -> set[int]:
        """Members that lack the model at the epoch's end, as those left out do."""
        return self._behind.union(left_out)

    def remove(self, rank: int) -> None:
        """A rank is gone."""
        for each in (self.adopting, self._behind, self.ready):
            each.discard(rank)

    def follow(self, members: Set[int], left_out: Iterable[int]) -> None:
        """The members are others now, and those left out take part again."""
        lack = self.adopting if self.is_told else members
        self._behind |= lack & {*left_out}

    def await_steps(self, members: Set[int]) -> None:
        """Ranks have died, and the others run what they have begun."""
        self.adopting = {*members} - self.ready - self._behind
        self.ready.clear()

    def tell(self, members: Iterable[int], source: int, last: int) -> list[Adopt]:
        """All take the model after the step ``last`` from one rank."""
        self.is_told = True
        self.adopting.update(members)
        return [
            Adopt(rank=rank, epoch=self._epoch, window=last, source=source)
            for rank in sorted(members)
        ]

    def take(self, event: ModelUpdated, *, is_paused: bool) -> None:
        """A rank has taken it over, also while the members form a new group.

        Raises:
            ProtocolError: it was not told to.
        """
        is_due = event.rank in self.adopting or is_paused
        if not is_due or event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} was to adopt nothing: {event}")
        if is_paused:
            self.ready.add(event.rank)  # others have yet to say that they are there
        self.adopting.discard(event.rank)
        self._behind.discard(event.rank)

    def check(self, members: Set[int]) -> None:
        """Asserts that they are members."""
        assert self._behind | self.adopting <= members
