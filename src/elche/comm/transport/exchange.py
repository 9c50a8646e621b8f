"""One message that all ranks sum: through gloo, or through memory that they share.

An exchange is made once, together, for messages of one size. A rank fills its
:meth:`Exchange.contribution`, calls :meth:`Exchange.begin`, and later
:meth:`Exchange.finish` returns the sum; or it asks :meth:`Exchange.poll` whether all is
there, and takes the sum in parts that stay in its cache (:meth:`Exchange.wait`, then
:meth:`Exchange.sum_into`). Contribution and sum are different memory for ranks that
share a host, and the order of summation is that of the ranks, so all of them get the
same bits.

Ranks on one host that pass megabytes through gloo's loopback sockets pay for it twice:
with system calls that take the cores the model computes on, and with wake-ups (measured
on two cores: nine messages of 1.05 MB took 9 to 25 ms; `docs/decisions.md`, "Shared
memory"). In shared memory the message is where the others read it as soon as it is
written.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.transport.process_group import Group
from elche.comm.transport.shared_memory import (
    aligned,
    map_together,
    may_share_memory,
)
from elche.errors import ProtocolError

COUNTER_BYTES = 8


class Exchange(ABC):
    """A message of fixed size, summed over all ranks.

    Args:
        sides: independent buffers, so that one can be read while another is summed.

    Attributes:
        keeps_contribution: what this rank sent is still there beside the sum.
    """

    keeps_contribution: bool

    def __init__(self, sides: int) -> None:
        self.sides = sides

    @abstractmethod
    def contribution(self, side: int) -> torch.Tensor:
        """This rank's message, to be filled; flat."""

    @abstractmethod
    def result(self, side: int) -> torch.Tensor:
        """Flat sum, valid after :meth:`finish`."""

    @abstractmethod
    def begin(self, side: int) -> None:
        """The contribution is complete."""

    @property
    def extra_bytes(self) -> int:
        """Host memory beside contributions and results."""
        return 0

    @abstractmethod
    def poll(self) -> bool:
        """True if :meth:`wait` would return, or raise, at once."""

    @abstractmethod
    def wait(self, what: str) -> None:
        """Waits for all ranks.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """

    @abstractmethod
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        """After :meth:`wait`: writes the sum of these elements into ``out``, flat."""

    @abstractmethod
    def release(self) -> None:
        """After the last :meth:`sum_into`: others may write this side again."""

    def reclaim(self, what: str) -> None:
        """Waits until all ranks have taken the sum of what was begun last.

        With one side a contribution may be written again after this.

        Raises:
            CommunicationError: a rank has not taken it in time.
        """
        return

    def finish(self, what: str) -> torch.Tensor:
        """Waits for all ranks; returns the sum of what was begun.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        self.wait(what)
        return self._collected()

    @property
    def has_sum(self) -> bool:
        """True if :meth:`wait` would return at once, and not raise."""
        return False

    @abstractmethod
    def _collected(self) -> torch.Tensor:
        """After :meth:`wait`: the whole sum, and the side released."""


class GlooExchange(Exchange):
    """Through the process group, on any mix of devices.

    A sum is formed in what was sent, which :meth:`renew` lays in other memory.
    """

    keeps_contribution = False

    def __init__(
        self,
        group: Group,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        sides: int,
    ) -> None:
        super().__init__(sides)
        self._group = group
        self._tensors = [
            torch.zeros(numel, dtype=dtype, device=device) for _ in range(sides)
        ]
        self._side = 0
        self._work: Any = None

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._tensors[side]

    def result(self, side: int) -> torch.Tensor:
        """The same memory: what a rank sends is a copy of what it has."""
        return self._tensors[side]

    def renew(self, side: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Lays this side's next message elsewhere; the last one is let go before."""
        self._tensors[side] = self._tensors[side].new_empty(0)
        self._tensors[side] = made = make()
        return made

    def begin(self, side: int) -> None:
        """Starts the collective."""
        self._side = side
        self._work = self._group.all_reduce_async(self._tensors[side])

    @override
    def poll(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    @override
    def wait(self, what: str) -> None:
        if self._work is not None:
            self._group.wait(self._work, what)
            self._work = None

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(self._tensors[self._side][start:stop])

    def release(self) -> None:
        """Does nothing: this memory is private to the rank."""

    @property
    @override
    def has_sum(self) -> bool:
        work = self._work  # which the training thread may take away meanwhile
        return work is None or succeeded(work)

    def _collected(self) -> torch.Tensor:
        return self._tensors[self._side]


class MemoryExchange(Exchange):
    """In memory that ranks of one host share: a slot per side and rank, two counters.

    A rank writes its slot, then raises its first counter to the message's number; it
    raises the second when it has read the sum. x86 keeps that order for other cores.
    A slot is written again ``sides`` messages later. By then every rank must have read
    it: with two sides that follows from their having come so far, with one side the
    caller waits for it (:meth:`reclaim`) or knows it by other means. :meth:`begin`
    checks it.

    Args:
        group: of the ranks that wait for each other.
        memory: that they share.
        members: places in the group of those who share it.
        layout: elements and dtype of a message.
        sides: independent slots of each rank.
        more: places of messages behind the slots.
    """

    keeps_contribution = True

    def __init__(
        self,
        group: Group,
        memory: mmap.mmap,
        members: Sequence[int],
        layout: tuple[int, torch.dtype],
        sides: int,
        more: int = 0,
    ) -> None:
        super().__init__(sides)
        self._group = group
        self._members = members
        self._place = members.index(group.rank)
        count, (numel, dtype) = len(members), layout
        counters = memoryview(memory)[: COUNTER_BYTES * (2 * count + 1)].cast("q")
        self._written, self._read = counters[:count], counters[count : 2 * count]
        self._summed = counters[2 * count :]
        begin, step = aligned(counters.nbytes), aligned(numel * dtype.itemsize)
        self._places = [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin + step * at)
            for at in range(sides * count + more)
        ]
        self._results: dict[int, torch.Tensor] = {}
        self._side = self._number = 0

    @staticmethod
    def size_bytes(ranks: int, numel: int, dtype: torch.dtype, places: int) -> int:
        """Memory of an exchange of so many ranks, with places for messages."""
        counters = aligned(COUNTER_BYTES * (2 * ranks + 1))
        return counters + aligned(numel * dtype.itemsize) * places

    def _slots(self, side: int) -> Sequence[torch.Tensor]:
        """Contributions of the ranks, as written."""
        count = len(self._members)
        return self._places[side * count : (side + 1) * count]

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._slots(side)[self._place]

    @override
    def result(self, side: int) -> torch.Tensor:
        if side not in self._results:
            self._results[side] = torch.zeros_like(self._places[0])
        return self._results[side]

    def begin(self, side: int) -> None:
        """Lets the others read the contribution.

        Raises:
            ProtocolError: a rank may still have been reading what was overwritten.
        """
        before = self._number + 1 - self.sides
        if min(self._read) < before:
            raise ProtocolError(
                f"rank {self._group.rank} wrote message {self._number + 1} before "
                f"ranks {self._behind(self._read, before)} had read message {before}, "
                "whose memory it took"
            )
        self._side = side
        self._number += 1
        self._written[self._place] = self._number

    @override
    def release(self) -> None:
        self._read[self._place] = self._number

    @override
    def reclaim(self, what: str) -> None:
        number = self._number
        if min(self._read) < number:
            self._group.wait_until(
                lambda: min(self._read) >= number,
                what,
                lambda: self._behind(self._read, number),
            )

    def _is_written(self) -> bool:
        return min(self._written) >= self._number

    def _missing(self) -> list[int]:
        return self._behind(self._written, self._number)

    def _behind(self, counters: memoryview, number: int) -> list[int]:
        pairs = zip(self._members, counters, strict=True)
        return [rank for rank, reached in pairs if reached < number]

    @torch.no_grad()
    def _collected(self) -> torch.Tensor:
        result = self.result(self._side)
        if self._read[self._place] < self._number:  # asked again: others may write
            self.sum_into(0, result.numel(), result)
            self.release()
        return result


@final
class SharedExchange(MemoryExchange):
    """All ranks share memory, and each sums for itself; see :func:`open_exchange`."""

    def __init__(
        self,
        group: Group,
        memory: mmap.mmap,
        numel: int,
        dtype: torch.dtype,
        sides: int,
    ) -> None:
        super().__init__(group, memory, range(group.world_size), (numel, dtype), sides)

    @override
    def poll(self) -> bool:
        return self._is_written()

    @override
    def wait(self, what: str) -> None:
        if not self._is_written():
            self._group.wait_until(self._is_written, what, self._missing)

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        first, second, *others = self._slots(self._side)
        torch.add(first[start:stop], second[start:stop], out=out)
        for slot in others:
            out.add_(slot[start:stop])

    @property
    @override
    def has_sum(self) -> bool:
        return self._is_written()


def succeeded(work: Any) -> bool:
    """True if a collective has ended, and well."""
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def open_exchange(
    group: Group,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    sides: int = 1,
    *,
    shared_sides: int | None = None,
) -> Exchange:
    """Makes an exchange, together with all ranks of the group.

    Args:
        group: the process group.
        numel: elements of a message.
        dtype: of the message.
        device: where it lives; shared memory serves the CPU.
        sides: independent buffers.
        shared_sides: of shared memory, where a caller does with fewer; None: as many.
    """
    if group.shares_host and numel and group.world_size > 1:
        shared = shared_sides or sides
        memory = map_together(
            group,
            SharedExchange.size_bytes(
                group.world_size, numel, dtype, shared * group.world_size
            ),
        )
        if memory is not None:
            return SharedExchange(group, memory, numel, dtype, shared)
    return GlooExchange(group, numel, dtype, device, sides)


def agree_to_share(group: Group, own: bool) -> bool:
    """True if all ranks may share memory with others of their hosts; with all of them.

    Each on its own device, and processor: hosts may differ.
    """
    mine = torch.tensor([int(own)], device="cpu")
    group.all_reduce(mine, "agreeing whether memory may be shared")
    return group.world_size > 1 and int(mine) == group.world_size


def can_share(device_name: str) -> bool:
    """True if a rank with this device may share memory with others of its host.

    Only on the CPU, and on processors that let other cores see writes in order.
    """
    return device_name.startswith("CPU") and may_share_memory()
