"""A group whose ranks are threads of the test; every wait has a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from elche.errors import CommunicationError

DEADLINE_S = 60.0
T = TypeVar("T")


class ThreadGroup:
    """One rank's end, with the methods that an exchange uses."""

    shares_host = False

    def __init__(
        self, rank: int, barrier: threading.Barrier, slots: list[torch.Tensor | None]
    ) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self.reductions = 0
        self._barrier = barrier
        self._slots = slots

    def all_reduce_async(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait(self, work: torch.Tensor, what: str) -> None:
        self.all_reduce(work, what)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        self.reductions += 1
        self._slots[self.rank] = tensor.clone()
        self._meet(what)
        parts = [part for part in self._slots if part is not None]
        total = sum(parts[1:], start=parts[0].clone())
        self._meet(what)
        tensor.copy_(total)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        raise AssertionError("not expected here")

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        raise AssertionError("not expected here")

    def _meet(self, what: str) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommunicationError(f"{what}: a rank has not come") from error


def on_ranks(
    world_size: int,
    case: Callable[..., T],
    *args: Sequence[Any],
    deadline_s: float = DEADLINE_S,
) -> list[T]:
    """Calls ``case(group, *each)`` on a thread per rank, and collects what it returns.

    Args:
        world_size: how many ranks.
        case: what each runs.
        args: per argument of the case, a value per rank.
        deadline_s: of each wait for another rank.
    """
    barrier = threading.Barrier(world_size, timeout=deadline_s)
    slots: list[torch.Tensor | None] = [None] * world_size
    groups = [ThreadGroup(rank, barrier, slots) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        futures = [
            pool.submit(case, group, *(values[group.rank] for values in args))
            for group in groups
        ]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, CommunicationError):
            raise error
    return [future.result() for future in futures]
