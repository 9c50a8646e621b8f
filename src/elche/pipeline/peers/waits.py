"""Wait reports between ranks, through the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.errors import CommunicationError
from elche.pipeline.peers.rendezvous import Rendezvous

TELL_S = 1.0
NAMED_AFTER_S = 10.0
"""So long all wait for a rank between steps until the log names it."""
REASON_WITHIN_S = 5.0
"""How long the reason for a lost connection may take to come by the coordinator."""


@final
class Waits:
    """Who waits for whom, told through the coordinator.

    Every rank publishes its long waits. One that is waited for and publishes nothing
    is the one that is late.
    """

    def __init__(self, channel: ControlChannel, rank: int, name: str) -> None:
        self._channel = channel
        self._rank = rank
        self._name = name

    def begin(self, rank: int, what: str) -> None:
        """This rank has waited for half the deadline, for one rank."""
        self.begin_all([rank], what)

    def begin_all(self, ranks: Sequence[int], what: str) -> None:
        """This rank has waited for half the deadline, for all of these ranks."""
        self._publish(f"{','.join(map(str, ranks))} {what}")

    def end(self) -> None:
        """This rank waits no more."""
        self._publish("")

    def explain(self, rank: int) -> str:
        """The deadline has passed, waiting for a rank: who is to blame."""
        return self.explain_all([rank])

    def explain_all(self, ranks: Sequence[int]) -> str:
        """The deadline has passed, waiting for these ranks: who is to blame."""
        late, seen = self._follow(ranks)
        named = " and ".join(f"rank {one}" for one in late or seen)
        if not late:
            return f"{named} wait for each other"
        if len(late) > 1:
            return f"{named} are late, and wait for no other rank"
        return f"{named} is late, and waits for nobody"

    def is_late(self, rank: int) -> bool:
        """Whether a rank that this one waits for waits for nobody itself."""
        return rank in self._follow([rank])[0]

    def _follow(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ranks that are waited for and wait for nobody, and all on the way to them."""
        seen, late = [self._rank], []
        to_ask = list(ranks)
        while to_ask:
            rank = to_ask.pop(0)
            if rank in seen:
                continue
            seen.append(rank)
            try:
                told = self._waits_of(rank)
            except CommunicationError:
                told = ""
            if told:
                to_ask += map(int, told.partition(" ")[0].split(","))
            else:
                late.append(rank)
        return late, seen

    def _waits_of(self, rank: int) -> str:
        store = Rendezvous(self._channel, self._rank, TELL_S)
        return store.store_get(self._key(rank), TELL_S).decode()

    def _publish(self, text: str) -> None:
        with contextlib.suppress(CommunicationError):
            self._channel.store_set(self._key(self._rank), text.encode())

    def _key(self, rank: int) -> str:
        return f"{self._name}/waits/{rank}"
