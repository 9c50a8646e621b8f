"""A simulated rank's view of its run. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Abort, Instruction, Reduce
from elche.sim.cluster import Break, Cluster
from elche.sim.engine import AbortedError, Engine
from elche.sim.history import History


class World(ABC):
    """The run around the ranks.

    Args:
        cluster: what is simulated.
        history: takes down what happens.

    Attributes:
        engine: the clock and the network.
        groups: members of each generation.
        books: the account of models, one per run, if it is kept.
        plans: what each rank was told last of a window's reduction; for the account.
    """

    def __init__(self, cluster: Cluster, history: History) -> None:
        self.cluster = cluster
        self.history = history
        self.engine = Engine(cluster, self.ended)
        self.groups: dict[int, frozenset[int]] = {}
        self.books: list[Any] = []
        self.plans: dict[int, dict[int, Reduce]] = {}
        self._breaks: dict[tuple[int, int], Break] = {
            (one.rank, one.epoch): one for one in cluster.breaks
        }

    @abstractmethod
    def hear(self, event: Event) -> None:
        """An event has arrived at the coordinator."""

    @abstractmethod
    def epoch_ended(self, run: int, epoch: int, rank: int) -> None:
        """A rank has ended an epoch."""

    @abstractmethod
    def ended(self, rank: int, by_abort: bool) -> None:
        """A process has ended by itself."""

    def break_at(self, rank: int, epoch: int) -> int | None:
        """After how many batches a rank's loop leaves an epoch; None if it does not."""
        found = self._breaks.get((rank, epoch))
        return None if found is None else found.batches

    def send(self, event: Event) -> None:
        """A rank's message travels to the core."""
        self.engine.travel("up", event.rank, self.hear, event)

    def take(self, rank: int) -> Instruction | None:
        """Next instruction in a rank's inbox, or None.

        Raises:
            AbortedError: it is told that the run ends.
        """
        inbox = self.engine.processes[rank].inbox
        if not inbox:
            return None
        instruction = inbox.popleft()
        if isinstance(instruction, Abort):
            self.history.aborts[rank] = instruction
            raise AbortedError(instruction.reason)
        return instruction
