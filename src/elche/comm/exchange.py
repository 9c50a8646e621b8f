"""One message that all ranks sum: through gloo, or through memory that they share.

An exchange is made once, together, for messages of one size. A rank fills its
:meth:`Exchange.contribution`, calls :meth:`Exchange.begin`, and later
:meth:`Exchange.finish` returns the sum. Contribution and sum are different memory for
ranks that share a host, and the order of summation is that of the ranks, so all of them
get the same bits.

Ranks on one host that pass megabytes through gloo's loopback sockets pay for it twice:
with system calls that take the cores the model computes on, and with wake-ups (measured
on two cores: 9 messages of 1 MB take 9 to 24 ms, `docs/decisions.md`). In shared memory
the message is where the others read it as soon as it is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

SPIN_S = 20e-6
SLEEP_S = 50e-6
CHECK_EVERY_S = 0.05
ALIGN_BYTES = 64
ORDERED_MACHINES = ("x86_64", "AMD64")
_TOKEN = struct.Struct("q")


class Members(Protocol):
    """What an exchange needs of a process group."""

    rank: int
    world_size: int
    shares_host: bool

    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        """Begins a sum over all ranks."""

    def wait(self, work: Any, what: str) -> None:
        """Waits for it."""

    def wait_until(self, ready: Callable[[], bool], late: Callable[[], str]) -> None:
        """Waits for other ranks."""

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Sums over all ranks."""

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Copies rank 0's."""


class Exchange(ABC):
    """A message of fixed size, summed over all ranks.

    Args:
        sides: independent buffers, so that one can be read while another is summed.
    """

    def __init__(self, sides: int) -> None:
        self.sides = sides

    @abstractmethod
    def contribution(self, side: int) -> torch.Tensor:
        """This rank's message, to be filled; flat."""

    @abstractmethod
    def result(self, side: int) -> torch.Tensor:
        """Where the sum is after :meth:`finish`; flat."""

    @abstractmethod
    def begin(self, side: int) -> None:
        """The contribution is complete."""

    @abstractmethod
    def advance(self) -> None:
        """Does what can be done now without waiting."""

    @abstractmethod
    def finish(self, what: str) -> torch.Tensor:
        """Waits for all ranks; returns the sum of what was begun.

        Raises:
            CommunicationError: it failed, or not everybody came in time.
        """


class GlooExchange(Exchange):
    """Through the process group, on any mix of devices."""

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

    def contribution(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.contribution`."""
        return self._tensors[side]

    def result(self, side: int) -> torch.Tensor:
        """The same memory: what a rank sends is a copy of what it has."""
        return self._tensors[side]

    def begin(self, side: int) -> None:
        """Starts the collective."""
        self._side = side
        self._work = self._group.all_reduce_async(self._tensors[side])

    def advance(self) -> None:
        """Gloo's own threads do it."""

    def finish(self, what: str) -> torch.Tensor:
        """See :meth:`Exchange.finish`."""
        self._group.wait(self._work, what)
        self._work = None
        return self._tensors[self._side]


class SharedExchange(Exchange):
    """Through memory shared by ranks of one host. Made by :func:`open_exchange`.

    Layout: a counter per rank, then a slot per side and rank. A rank writes its slot,
    then raises its counter; x86 keeps that order for other cores. A slot is written
    again ``sides`` messages later, when every rank must have read it to have come so
    far (with one side the caller must know that by other means).
    """

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
        self._counters = memoryview(memory)[: 8 * world_size].cast("q")
        slot_bytes = _aligned(numel * dtype.itemsize)
        begin = _aligned(8 * world_size)
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
        self._results = [torch.zeros(numel, dtype=dtype) for _ in range(sides)]
        self._side = 0
        self._number = 0
        self._collected = True

    def contribution(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.contribution`."""
        return self._slots[side][self._rank]

    def result(self, side: int) -> torch.Tensor:
        """See :meth:`Exchange.result`."""
        return self._results[side]

    def begin(self, side: int) -> None:
        """Lets the others read the contribution."""
        self._side = side
        self._number += 1
        self._collected = False
        self._counters[self._rank] = self._number

    def advance(self) -> None:
        """Sums if all contributions are there."""
        if not self._collected and self._missing() is None:
            self._collect()

    def finish(self, what: str) -> torch.Tensor:
        """See :meth:`Exchange.finish`."""
        if not self._collected:
            self._group.wait_until(
                lambda: self._missing() is None,
                lambda: f"{what}: rank {self._missing()} has not come",
            )
            self._collect()
        return self._results[self._side]

    def _missing(self) -> int | None:
        for rank, number in enumerate(self._counters):
            if number < self._number:
                return rank
        return None

    def _collect(self) -> None:
        slots, result = self._slots[self._side], self._results[self._side]
        with torch.no_grad():
            torch.add(slots[0], slots[1], out=result)
            for slot in slots[2:]:
                result.add_(slot)
        self._collected = True


def open_exchange(
    group: Members,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    sides: int = 1,
) -> Exchange:
    """Makes an exchange, together with all ranks of the group.

    Args:
        group: the process group.
        numel: elements of a message.
        dtype: of the message.
        device: where it lives; shared memory serves the CPU.
        sides: independent buffers.
    """
    if group.shares_host and numel:
        memory = _shared_memory(group, numel * dtype.itemsize, sides)
        if memory is not None:
            return SharedExchange(group, memory, numel, dtype, sides)
    return GlooExchange(group, numel, dtype, device, sides)


def may_share(device_names: tuple[str, ...]) -> bool:
    """Whether ranks with these devices may try: all of them compute on the CPU.

    Only on processors that let other cores see writes in order.
    """
    on_cpu = all(name.startswith("CPU") for name in device_names)
    return (
        on_cpu
        and len(device_names) > 1
        and platform.machine() in ORDERED_MACHINES
        and hasattr(os, "memfd_create")
    )


def wait_until(
    ready: Callable[[], bool],
    check: Callable[[], None],
    on_timeout: Callable[[], Exception],
    timeout_s: float,
) -> None:
    """Waits for other ranks without holding a core for long.

    Args:
        ready: what is waited for.
        check: called now and then; raises if the run was ended.
        on_timeout: makes the error at the deadline.
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
                raise on_timeout()
        if now_s - started_s > SPIN_S:
            time.sleep(SLEEP_S)


def _shared_memory(group: Members, message_bytes: int, sides: int) -> mmap.mmap | None:
    """Anonymous memory of rank 0 that every rank maps; None if one cannot.

    It has no name, so nothing is left behind however the ranks end; only processes of
    the same user can open it.
    """
    world_size = group.world_size
    size = _aligned(8 * world_size) + _aligned(message_bytes) * sides * world_size
    descriptor, token = -1, secrets.randbits(62)
    if group.rank == 0:
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("elche")
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, _TOKEN.pack(token), size)
    where = torch.tensor([os.getpid(), descriptor, token], dtype=torch.int64)
    group.broadcast(where, "sharing memory")
    pid, number, token = where.tolist()
    memory = _map(pid, number, token, size)
    missing = torch.tensor([int(memory is None)])
    group.all_reduce(missing, "agreeing on shared memory")
    if descriptor >= 0:
        os.close(descriptor)
    if int(missing):
        group.shares_host = False
        return None
    return memory


def _map(pid: int, descriptor: int, token: int, size: int) -> mmap.mmap | None:
    """Maps the memory that another process holds; None if it is not that one.

    The token tells it from a file that happens to be there on another host.
    """
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(opened, _TOKEN.size, size) != _TOKEN.pack(token):
            return None
        return mmap.mmap(opened, size)
    except OSError:
        return None
    finally:
        os.close(opened)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
