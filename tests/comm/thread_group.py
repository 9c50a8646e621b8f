"""A group whose ranks are threads of the test; every wait has a deadline."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from elche.comm.transport.process_group import SLEEP_S
from elche.errors import CommunicationError

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
    memory: torch.Tensor
    is_done: bool = False

    def wait(self, timeout: timedelta) -> None:
        with self.shared.changed:
            self.shared.changed.wait_for(
                lambda: self.is_done or self.shared.has_failed, timeout.total_seconds()
            )
        if not self.is_done:
            raise RuntimeError("a rank has not come")


class Shared:
    """What the ranks of one group share: their collectives in order."""

    def __init__(self, world_size: int, deadline_s: float) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.collectives: list[Collective] = []
        self.sent: Transfers = defaultdict(deque)
        self.wanted: Transfers = defaultdict(deque)
        self.has_failed = False

    def fail(self) -> None:
        """A rank is gone: nobody is to wait for it."""
        with self.changed:
            self.has_failed = True
            self.changed.notify_all()


Transfers = defaultdict[tuple[int, int, int], deque[Transfer]]


class ThreadGroup:
    """One rank's end, with the methods of `Group` that exchanges and averaging use."""

    def __init__(self, rank: int, shared: Shared, shares_host: bool) -> None:
        self.rank = rank
        self.world_size = shared.world_size
        self.shares_host = shares_host
        self.host_leaders: Any = None
        self.reductions = self.reduced_bytes = 0
        self.ranks = range(shared.world_size)
        self.timeout_s = shared.deadline_s
        self.sent_bytes = 0
        self.transfers: dict[Any, torch.Tensor] = {}
        self.exchanges: WeakSet[Any] = WeakSet()
        self._begun = 0
        self._shared = shared

    def hosts(self) -> tuple[str, ...]:
        return ()

    @property
    def point_to_point(self) -> ThreadGroup:
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Transfer:
        made = Transfer(self._shared, tensors[0])
        self.sent_bytes += tensors[0].numel()
        return self._meet(made, self._shared.sent, (self.rank, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Transfer:
        made = Transfer(self._shared, tensors[0])
        return self._meet(made, self._shared.wanted, (source, self.rank, tag))

    def _meet(
        self, made: Transfer, where: Transfers, key: tuple[int, int, int]
    ) -> Transfer:
        shared = self._shared
        with shared.changed:
            where[key].append(made)
            while shared.sent[key] and shared.wanted[key]:
                giver, taker = shared.sent[key].popleft(), shared.wanted[key].popleft()
                # The number comes last, as gloo writes it.
                taker.memory[:-8].copy_(giver.memory[:-8])
                taker.memory[-8:].copy_(giver.memory[-8:])
                giver.is_done = taker.is_done = True
            shared.changed.notify_all()
        return made

    def on_failure(self, text: str, missing: Sequence[int]) -> Exception:
        return CommunicationError(text)

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
