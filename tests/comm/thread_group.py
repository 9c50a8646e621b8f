"""A group whose ranks are threads of the test; every wait has a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from elche.comm.transport.process_group import SLEEP_S
from elche.errors import CommunicationError
from tests.comm import peers

DEADLINE_S = 60.0
T = TypeVar("T")


@dataclass
class Collective:
    """A sum that some ranks have begun."""

    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None


@dataclass
class Work:
    """One rank's part in a sum; as with gloo the result is in the tensor it gave."""

    collective: Collective
    tensor: torch.Tensor

    def is_completed(self) -> bool:
        return self.collective.total is not None

    def wait(self) -> None:
        assert self.is_completed()


@dataclass(eq=False)
class Transfer:
    """One end of a message from rank to rank."""

    shared: Shared
    work: peers.Work

    def wait(self, timeout: timedelta) -> None:
        with self.shared.changed:
            self.shared.changed.wait_for(
                lambda: self.work.is_done or self.shared.has_failed,
                timeout.total_seconds(),
            )
        self.work.wait(timeout)


class Shared:
    """What the ranks of one group share: their collectives in order."""

    def __init__(self, world_size: int, deadline_s: float) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.collectives: list[Collective] = []
        self.wire = peers.Wire(world_size)
        self.has_failed = False

    def fail(self) -> None:
        """A rank is gone: nobody is to wait for it."""
        with self.changed:
            self.has_failed = True
            self.changed.notify_all()


class ThreadGroup(peers.Peer):
    """One rank's end, with the methods of `Group` that exchanges and averaging use."""

    def __init__(self, rank: int, shared: Shared, shares_host: bool = False) -> None:
        super().__init__(shared.wire, rank)
        self.shares_host = shares_host
        self.host_leaders: Any = None
        self.reductions = self.reduced_bytes = 0
        self.timeout_s = shared.deadline_s
        self.exchanges: Any = WeakSet()
        self._begun = 0
        self._shared = shared

    def hosts(self) -> tuple[str, ...]:
        return ()

    def put(self, end: int, key: tuple[int, int, int], memory: torch.Tensor) -> Any:
        with self._shared.changed:
            work = super().put(end, key, memory)
            self._shared.changed.notify_all()
        return Transfer(self._shared, work)

    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        self.reductions += 1
        self.reduced_bytes += tensor.nbytes
        return self._begin(tensor, tensor.clone())

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        self.wait(self.all_reduce_async(tensor), what)

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        mine = tensor.clone() if self.rank == source else torch.zeros_like(tensor)
        self.wait(self._begin(tensor, mine), what)

    def wait(self, work: Work, what: str) -> None:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(
                lambda: work.is_completed() or shared.has_failed, shared.deadline_s
            )
        if work.collective.total is None:
            raise CommunicationError(f"{what}: a rank has not come")
        work.tensor.copy_(work.collective.total)

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        until_s = time.monotonic() + self._shared.deadline_s
        while not ready():
            if self._shared.has_failed or time.monotonic() > until_s:
                raise CommunicationError(f"{what}: a rank has not come")
            time.sleep(SLEEP_S)

    def _begin(self, tensor: torch.Tensor, mine: torch.Tensor) -> Work:
        shared = self._shared
        with shared.changed:
            if self._begun == len(shared.collectives):
                shared.collectives.append(Collective())
            collective = shared.collectives[self._begun]
            self._begun += 1
            collective.parts[self.rank] = mine
            if len(collective.parts) == shared.world_size:
                parts = [collective.parts[rank] for rank in range(shared.world_size)]
                assert len({(part.shape, part.dtype) for part in parts}) == 1
                collective.total = sum(parts[1:], start=parts[0].clone())
                shared.changed.notify_all()
        return Work(collective, tensor)


def on_ranks(
    world_size: int,
    case: Callable[..., T],
    *args: Sequence[Any],
    deadline_s: float = DEADLINE_S,
    shares_host: bool = False,
) -> list[T]:
    """Calls ``case(group, *each)`` on a thread per rank, and collects what it returns.

    Args:
        world_size: how many ranks.
        case: what each runs.
        args: per argument of the case, a value per rank.
        deadline_s: of each wait for another rank.
        shares_host: ranks sum in memory that they share, not by collectives.
    """
    shared = Shared(world_size, deadline_s)
    groups = [ThreadGroup(rank, shared, shares_host) for rank in range(world_size)]

    def run(group: ThreadGroup) -> T:
        try:
            return case(group, *(values[group.rank] for values in args))
        except BaseException:
            shared.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, group) for group in groups]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, CommunicationError):
            raise error
    return [future.result() for future in futures]
