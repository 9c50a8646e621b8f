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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from elche.comm.transport.shared_memory import (
    Members,
    aligned,
    map_together,
    may_share_memory,
)
from elche.errors import ProtocolError

SPIN_S = 20e-6
SLEEP_S = 50e-6
CHECK_EVERY_S = 0.05


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

    @abstractmethod
    def advance(self) -> None:
        """Does what can be done now without waiting."""

    @property
    def is_collected(self) -> bool:
        """True if the sum is in :meth:`result` and :meth:`finish` has nothing to do."""
        return False

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
        group: Members,
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

    def advance(self) -> None:
        """Gloo's own threads do it."""

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
        """Nobody else sees this memory."""

    @property
    @override
    def has_sum(self) -> bool:
        work = self._work  # which the training thread may take away meanwhile
        return work is None or succeeded(work)

    def _collected(self) -> torch.Tensor:
        return self._tensors[self._side]


class SharedExchange(Exchange):
    """Through memory shared by ranks of one host. Made by :func:`open_exchange`.

    Layout: two counters per rank, then a slot per side and rank. A rank writes its
    slot, then raises its first counter to the message's number; it raises the second
    when it has read the others'. x86 keeps that order for other cores. A slot is
    written again ``sides`` messages later. By then every rank must have read it: with
    two sides that follows from their having come so far, with one side the caller
    waits for it (:meth:`reclaim`) or knows it by other means. :meth:`begin` checks it.
    """

    keeps_contribution = True

    def __init__(
        self,
        group: Members,
        memory: mmap.mmap,
        numel: int,
        dtype: torch.dtype,
        sides: int,
    ) -> None:
        super().__init__(sides)
        self._group = group
        world_size, rank = group.world_size, group.rank
        counters = memoryview(memory)[: 16 * world_size].cast("q")
        self._written = counters[:world_size]
        self._read = counters[world_size:]
        slot_bytes = aligned(numel * dtype.itemsize)
        begin = aligned(16 * world_size)
        self._slots = [
            [
                torch.frombuffer(
                    memory,
                    dtype=dtype,
                    count=numel,
                    offset=begin + slot_bytes * (side * world_size + peer),
                )
                for peer in range(world_size)
            ]
            for side in range(sides)
        ]
        self._rank = rank
        self._results: list[torch.Tensor | None] = [None] * sides
        self._side = 0
        self._number = 0

    @staticmethod
    def size_bytes(world_size: int, numel: int, dtype: torch.dtype, sides: int) -> int:
        """Memory that such an exchange takes."""
        slot_bytes = aligned(numel * dtype.itemsize)
        return aligned(16 * world_size) + slot_bytes * sides * world_size

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._slots[side][self._rank]

    @override
    def result(self, side: int) -> torch.Tensor:
        made = self._results[side]
        if made is None:
            made = self._results[side] = torch.zeros_like(self._slots[side][0])
        return made

    def begin(self, side: int) -> None:
        """Lets the others read the contribution.

        Raises:
            ProtocolError: a rank may still have been reading what was overwritten.
        """
        self._side = side
        self._number += 1
        for rank, number in enumerate(self._read):
            if number < self._number - self.sides:
                raise ProtocolError(
                    f"rank {self._rank} wrote message {self._number} before rank "
                    f"{rank} had read message {self._number - self.sides}, whose "
                    "memory it took"
                )
        self._written[self._rank] = self._number

    def advance(self) -> None:
        """Sums if all contributions are there."""
        if not self.is_collected and self.poll():
            self._collected()

    @override
    def poll(self) -> bool:
        return all(number >= self._number for number in self._written)

    @override
    def wait(self, what: str) -> None:
        if not self.is_collected:
            self._group.wait_until(self.poll, what, self._missing)

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        slots = self._slots[self._side]
        torch.add(slots[0][start:stop], slots[1][start:stop], out=out)
        for slot in slots[2:]:
            out.add_(slot[start:stop])

    @override
    def release(self) -> None:
        self._read[self._rank] = self._number

    @property
    @override
    def has_sum(self) -> bool:
        return self.poll()

    @override
    def reclaim(self, what: str) -> None:
        if self._unread():
            self._group.wait_until(lambda: not self._unread(), what, self._unread)

    @property
    @override
    def is_collected(self) -> bool:
        return self._read[self._rank] == self._number

    def _unread(self) -> list[int]:
        read = enumerate(self._read)
        return [rank for rank, number in read if number < self._number]

    def _missing(self) -> list[int]:
        written = enumerate(self._written)
        return [rank for rank, number in written if number < self._number]

    def _collected(self) -> torch.Tensor:
        result = self.result(self._side)
        if not self.is_collected:
            with torch.no_grad():
                self.sum_into(0, result.numel(), result)
            self.release()
        return result


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
    group: Members,
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
            group, SharedExchange.size_bytes(group.world_size, numel, dtype, shared)
        )
        if memory is not None:
            return SharedExchange(group, memory, numel, dtype, shared)
    return GlooExchange(group, numel, dtype, device, sides)


def agree_to_share(group: Members, own: bool) -> bool:
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


def wait_until(
    ready: Callable[[], bool],
    check: Callable[[], None],
    on_timeout: Callable[[], Exception | None],
    timeout_s: float,
) -> None:
    """Waits for other ranks without holding a core for long.

    Args:
        ready: what is waited for.
        check: called now and then; raises if the run was ended.
        on_timeout: makes the error at the deadline; None: it has come just now.
        timeout_s: the deadline.
    """
    started_s = time.perf_counter()
    checked_s = started_s
    while not ready():
        now_s = time.perf_counter()
        if now_s - checked_s > CHECK_EVERY_S:
            checked_s = now_s
            check()
            if now_s - started_s > timeout_s:
                error = on_timeout()
                if error is not None:
                    raise error
        if now_s - started_s > SPIN_S:
            time.sleep(SLEEP_S)
