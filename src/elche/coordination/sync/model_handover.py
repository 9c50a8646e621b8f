"""Copies of the model to ranks of ``sync`` that lack its last steps. Pure.

An excluded rank falls behind, and loops may leave an epoch after different steps. Such
ranks copy the model from one that has it, while no rank runs a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import final

from elche.coordination.protocol.events import ModelUpdated
from elche.coordination.protocol.instructions import Adopt
from elche.errors import ProtocolError


@final
class ModelHandover:
    """Ranks of an epoch that lack the model and have yet to copy it.

    Args:
        epoch: epoch number; all ranks begin the epoch with the same model.

    Attributes:
        behind: members that were excluded from steps of the epoch. They copy the
            model at its end.
        adopting: members that are copying it, or running the steps they have begun.
        ready: members that have finished that while another group formed.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.behind: set[int] = set()
        self.adopting: set[int] = set()
        self.ready: set[int] = set()
        self._is_instructed = False

    @property
    def is_due(self) -> bool:
        """True if ranks are behind and no `Adopt` has been sent."""
        return bool(self.behind) and not self._is_instructed

    def remove(self, rank: int) -> None:
        """Removes a lost rank."""
        for each in (self.behind, self.adopting, self.ready):
            each.discard(rank)

    def await_steps(self, members: Set[int]) -> None:
        """After deaths: waits until members have run the steps that any has begun."""
        self.adopting = {*members} - self.ready - self.behind
        self.ready.clear()
        self._is_instructed = False

    def instruct(self, members: Iterable[int], source: int, last: int) -> list[Adopt]:
        """Instructs members to copy the model after step ``last`` from ``source``."""
        self._is_instructed = True
        self.adopting.update(members)
        return [
            Adopt(rank=rank, epoch=self._epoch, window=last, source=source)
            for rank in sorted(members)
        ]

    def take(self, event: ModelUpdated, *, is_paused: bool) -> None:
        """Records that a rank has copied the model, even while a new group forms.

        Raises:
            ProtocolError: the rank was not instructed to adopt.
        """
        is_due = event.rank in self.adopting or is_paused
        if not is_due or event.epoch != self._epoch:
            raise ProtocolError(f"rank {event.rank} adopted a model unasked: {event}")
        if is_paused:
            self.ready.add(event.rank)  # other ranks have not arrived yet
        self.adopting.discard(event.rank)

    def check(self, members: Set[int]) -> None:
        """Asserts that all these ranks are members."""
        assert self.behind | self.adopting <= members
