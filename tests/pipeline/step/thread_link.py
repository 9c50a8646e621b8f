"""Messages between ranks that are threads of the test, for elche's own transport.

As with gloo a send ends when its receiver has asked for it, and what has been received
is there when the receive has been waited for. Each wait has a deadline.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch

from elche.pipeline.peers.transport import Transport

DEADLINE_S = 60.0


@dataclass
class Work:
    """One end of a transfer."""

    memory: torch.Tensor
    changed: threading.Condition
    is_done: bool = False

    def wait(self) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_done, DEADLINE_S):
                raise RuntimeError("the other end has not come")


class Link:
    """What is between the ranks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: dict[tuple[int, int, int], tuple[deque[Work], deque[Work]]] = (
            defaultdict(lambda: (deque(), deque()))
        )

    def put(self, way: tuple[int, int, int], memory: torch.Tensor, end: int) -> Work:
        """Begins one end (0: sends, 1: receives) of the next message on a way."""
        work = Work(memory, self.changed)
        with self.changed:
            ends = self._waiting[way]
            ends[end].append(work)
            if all(ends):
                giver, taker = ends[0].popleft(), ends[1].popleft()
                taker.memory.copy_(giver.memory)
                giver.is_done = taker.is_done = True
                self.changed.notify_all()
        return work


class Port:
    """One rank's end, as `PointToPoint` describes it."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((self._rank, rank, tag), tensors[0], 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._link.put((rank, self._rank, tag), tensors[0], 1)


class NoWatch:
    """Nobody is told of long waits."""

    def begin(self, rank: int, what: str) -> None:
        """It waits."""

    def end(self) -> None:
        """It waits no more."""

    def explain(self, rank: int) -> str:
        return "nobody knows why"


def transports(world_size: int) -> list[Any]:
    """A transport for each rank; to be closed."""
    link = Link()
    return [
        Transport(Port(link, rank), rank, lambda: None, NoWatch())
        for rank in range(world_size)
    ]
