"""A group of ranks in one process: a collective ends when the last rank has begun it.

The calls of the ranks are made one after the other, in any order that real ranks could
make them in; a wait for a rank that has not come yet fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from elche.comm.model_buffers import known_buffers
from elche.comm.transport.process_group import Group, late_error
from elche.errors import CommunicationError


@dataclass
class Collective:
    """A sum that some ranks have begun."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    is_done: bool = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        assert self.is_done


class Bus:
    """What the ranks of one group share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.collectives: list[Collective] = []

    def group(self, rank: int) -> Group:
        return cast(Group, Member(self, rank))

    def groups(self) -> list[Group]:
        return [self.group(rank) for rank in range(self.world_size)]


class Member:
    """One rank's end of a bus, with the methods of `Group` that averaging uses."""

    shares_host = False
    host_leaders: Any = None

    def __init__(self, bus: Bus, rank: int) -> None:
        self.bus = bus
        self.rank = rank
        self.world_size = bus.world_size
        self.begun = 0

    def hosts(self) -> tuple[str, ...]:
        return ()

    def all_reduce_async(self, tensor: torch.Tensor) -> Collective:
        if self.begun == len(self.bus.collectives):
            self.bus.collectives.append(Collective())
        collective = self.bus.collectives[self.begun]
        self.begun += 1
        collective.tensors[self.rank] = tensor
        if len(collective.tensors) == self.world_size:
            ordered = [collective.tensors[r] for r in range(self.world_size)]
            assert len({(t.shape, t.dtype) for t in ordered}) == 1
            total = sum(ordered[1:], start=ordered[0].clone())
            for each in ordered:
                each.copy_(total)
            collective.is_done = True
        return collective

    def wait(self, work: Collective, what: str) -> None:
        if not work.is_done:
            # As gloo does: what was half reduced is lost.
            work.tensors[self.rank].fill_(float("nan"))
            raise CommunicationError(f"{what} failed on rank {self.rank}: nobody came")

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        if what == known_buffers.AGREEING:
            # A row per rank: they are built one after the other.
            tensor.copy_(tensor[self.rank].clone().expand_as(tensor))
            return
        self.wait(self.all_reduce_async(tensor), what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Nothing that the tests look at."""

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        if not ready():
            raise late_error(what, missing() if missing is not None else ())
