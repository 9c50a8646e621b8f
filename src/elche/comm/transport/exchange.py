"""All-reduce of a message of fixed size, through gloo or shared memory.

All ranks make an exchange together. A rank fills its :meth:`Exchange.contribution`,
calls :meth:`Exchange.begin`, and gets the sum from :meth:`Exchange.finish`. Or it polls
with :meth:`Exchange.poll` and reads the sum in cache-sized parts
(:meth:`Exchange.wait`, then :meth:`Exchange.sum_into`). In shared memory, contribution
and sum are separate, and values are added in rank order, so all get the same bits.
Shared memory costs less than gloo's sockets (`docs/decisions.md`, "Shared memory").
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.transport.process_group import SLEEP_S, Group, gather_values
from elche.comm.transport.shared_memory import aligned, map_together
from elche.errors import ProtocolError

COUNTER_BYTES = 8
LEAST_RANKS = 4
LEAST_BYTES = 1 << 25
"""Least number of ranks, and bytes of all their messages, for a sum in parts.

A smaller one costs less than waiting for parts does (`benchmarks.links.shared_sums`).
"""
MOST_LATE_S = 1.0
"""Upper bound (s) of a wait for other ranks' parts, in which no death is noticed.

The wait is derived from this rank's own sum, which takes too long if it is stopped.
"""


class Exchange(ABC):
    """A message of fixed size, summed over all ranks.

    Args:
        sides: number of independent buffers, so that one can be read while another is
            summed.

    Attributes:
        keeps_contribution: True if the sum does not overwrite the contribution.
    """

    keeps_contribution: bool

    def __init__(self, sides: int) -> None:
        self.sides = sides

    @abstractmethod
    def contribution(self, side: int) -> torch.Tensor:
        """Returns this rank's flat message, to be filled."""

    def result(self, side: int) -> torch.Tensor:
        """Returns the flat sum, valid after :meth:`finish`."""
        return self.contribution(side)

    @abstractmethod
    def begin(self, side: int) -> None:
        """Sends the filled contribution."""

    @property
    def extra_bytes(self) -> int:
        """Host memory (bytes) in addition to contributions and results."""
        return 0

    @abstractmethod
    def poll(self) -> bool:
        """True if :meth:`wait` would return, or raise, at once."""

    @abstractmethod
    def wait(self, what: str) -> None:
        """Waits for the contributions of all ranks.

        Raises:
            CommunicationError: the reduction failed, or a rank timed out.
        """

    @abstractmethod
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Writes the sum of these elements to flat ``out``; call after :meth:`wait`."""

    def release(self) -> None:
        """Releases this side for overwriting; call after the last :meth:`sum_into`."""
        return

    @property
    def is_read(self) -> bool:
        """True if all ranks have read the last sum: :meth:`reclaim` returns at once."""
        return True

    def reclaim(self, what: str) -> None:
        """Waits until all ranks have read the last sum.

        With one side, the contribution may be overwritten after this.

        Raises:
            CommunicationError: a rank has not read the sum in time.
        """
        return

    def finish(self, what: str) -> torch.Tensor:
        """Waits for all ranks; returns the sum of the last message.

        Raises:
            CommunicationError: the reduction failed, or a rank timed out.
        """
        self.wait(what)
        return self._collected()

    @property
    def has_sum(self) -> bool:
        """True if :meth:`wait` would return at once without raising."""
        return self.poll()

    @abstractmethod
    def _collected(self) -> torch.Tensor:
        """Returns the whole sum and releases the side; call after :meth:`wait`."""


class GlooExchange(Exchange):
    """Exchange through the process group, on any mix of devices.

    The sum overwrites the contribution; :meth:`renew` allocates a new one.
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

    def renew(self, side: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Allocates this side's next message by ``make``, after releasing the last."""
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

    @property
    @override
    def has_sum(self) -> bool:
        work = self._work  # the training thread may reset it meanwhile
        return work is None or succeeded(work)

    def _collected(self) -> torch.Tensor:
        return self._tensors[self._side]


class MemoryExchange(Exchange):
    """Exchange in one host's shared memory: a slot per side and rank, and sums.

    A rank writes its slot, then raises its first counter to the message's number. It
    raises the second when it has read the sum. x86 keeps this order for other cores. A
    slot is overwritten ``sides`` messages later; by then every rank must have read it.
    With two sides this follows from the order of calls; with one, the caller waits
    (:meth:`reclaim`) or ensures it otherwise. :meth:`begin` checks it. A third counter
    has the number of the last message in the sums, or in a rank's part of the sum.

    Args:
        group: group of the ranks that wait for each other.
        memory: shared memory.
        members: places in the group of the ranks that share the memory.
        layout: number of elements and dtype of a message.
        sides: number of independent slots per rank.
        sums: number of message-sized sums after the slots.
    """

    keeps_contribution = True

    def __init__(
        self,
        group: Group,
        memory: mmap.mmap,
        members: Sequence[int],
        layout: tuple[int, torch.dtype],
        sides: int,
        sums: int = 0,
    ) -> None:
        super().__init__(sides)
        self._group = group
        self._members = members
        self._place = members.index(group.rank)
        count, (numel, dtype) = len(members), layout
        counters = memoryview(memory)[: COUNTER_BYTES * 3 * count].cast("q")
        self._written, self._read = counters[:count], counters[count : 2 * count]
        self._summed = counters[2 * count :]
        begin, step = aligned(counters.nbytes), aligned(numel * dtype.itemsize)
        places = [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin + step * at)
            for at in range(sides * count + sums)
        ]
        self._slots = [places[side * count :][:count] for side in range(sides)]
        self._sums = places[sides * count :]
        self._results: dict[int, torch.Tensor] = {}
        self._side = self._number = 0

    @staticmethod
    def size_bytes(ranks: int, numel: int, dtype: torch.dtype, places: int) -> int:
        """Returns the memory of an exchange for a number of ranks and places."""
        return aligned(COUNTER_BYTES * 3 * ranks) + (
            aligned(numel * dtype.itemsize) * places
        )

    @property
    @override
    def extra_bytes(self) -> int:
        """This rank's share of the memory (bytes) of the sums."""
        return sum(each.nbytes for each in self._sums) // len(self._members)

    @override
    def contribution(self, side: int) -> torch.Tensor:
        return self._slots[side][self._place]

    @override
    def result(self, side: int) -> torch.Tensor:
        if side not in self._results:
            self._results[side] = torch.zeros_like(self._slots[0][0])
        return self._results[side]

    def begin(self, side: int) -> None:
        """Publishes the contribution to the other ranks.

        Raises:
            ProtocolError: a rank may not have read the overwritten message yet.
        """
        before = self._number + 1 - self.sides
        if min(self._read) < before:
            raise ProtocolError(
                f"rank {self._group.rank} wrote message {self._number + 1} before "
                f"ranks {self._behind(self._read, before)} had read message {before}, "
                "whose memory it overwrote"
            )
        self._side = side
        self._number += 1
        self._written[self._place] = self._number

    @override
    def release(self) -> None:
        self._read[self._place] = self._number

    @property
    @override
    def is_read(self) -> bool:
        return min(self._read) >= self._number

    @override
    def reclaim(self, what: str) -> None:
        number = self._number
        if min(self._read) < number:
            self._group.wait_until(
                lambda: min(self._read) >= number,
                what,
                lambda: self._behind(self._read, number),
            )

    def is_written(self) -> bool:
        """True if all ranks that share the memory have written the message."""
        return min(self._written) >= self._number

    def _missing(self) -> list[int]:
        return self._behind(self._written, self._number)

    def _behind(self, counters: memoryview, number: int) -> list[int]:
        pairs = zip(self._members, counters, strict=True)
        return [rank for rank, reached in pairs if reached < number]

    def _add(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Writes the sum of these elements of the slots, in rank order, to ``out``."""
        first, *others = self._slots[self._side]
        if not others:
            out.copy_(first[start:stop])
            return
        torch.add(first[start:stop], others[0][start:stop], out=out)
        for slot in others[1:]:
            out.add_(slot[start:stop])

    @torch.no_grad()
    def _collected(self) -> torch.Tensor:
        result = self.result(self._side)
        if self._read[self._place] < self._number:  # else released: may be overwritten
            self.sum_into(0, result.numel(), result)
            self.release()
        return result


@final
class SharedExchange(MemoryExchange):
    """Exchange in memory shared by all ranks; made by :func:`open_exchange`.

    Without a sum in the memory, each rank sums the slots itself. With one, each rank
    sums its *part* there, and copies the others' parts::

        slots of all ranks ──part 0, rank 0──┐
                           ──part 1, rank 1──┼─▶ sum ──copy──▶ each rank
                           ──part 2, rank 2──┘

    A rank whose part is late may be busy, stopped or dead. Then the others sum that
    part themselves, from the slots, which stay until all have read the sum. So the sum
    is complete once all ranks have written, whatever happens to them afterwards.

    All ranks have read the last sum before one of them overwrites a part of it.
    """

    _late_s = 0.0  # when other ranks' parts are late
    _tried = 0  # last message of which this rank has summed its part

    @cached_property
    def _part(self) -> int:
        """Elements of a part, in whole cache lines."""
        slot, ranks = self._slots[0][0], len(self._members)
        return aligned(-(-slot.numel() // ranks) * slot.itemsize) // slot.itemsize

    @override
    def poll(self) -> bool:
        if not self.is_written():
            return False
        if not self._sums:
            return True
        if self._tried < self._number:
            self._sum_part()
        return min(self._summed) >= self._number or time.perf_counter() > self._late_s

    @property
    @override
    def has_sum(self) -> bool:
        return self.is_written()

    @override
    def wait(self, what: str) -> None:
        if not self.is_written():
            self._group.wait_until(self.is_written, what, self._missing)
        while not self.poll():
            time.sleep(SLEEP_S)

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        if not self._sums:
            self._add(start, stop, out)
            return
        for at in range(start // self._part, -(-stop // self._part)):
            low, high = max(start, at * self._part), min(stop, (at + 1) * self._part)
            into = out[low - start : high - start]
            if self._summed[at] >= self._number:
                into.copy_(self._sums[0][low:high])
            else:  # late
                self._add(low, high, into)

    @torch.no_grad()
    def _sum_part(self) -> None:
        """Sums this rank's part; then waits no longer than summing the rest takes."""
        started_s, self._tried = time.perf_counter(), self._number
        if min(self._read) >= self._number - 1:  # else its memory may be in use
            start = self._place * self._part
            into = self._sums[0][start : start + self._part]
            self._add(start, start + into.numel(), into)
            self._summed[self._place] = self._number
        now_s = time.perf_counter()
        rest_s = (now_s - started_s) * (len(self._members) - 1)
        self._late_s = now_s + min(rest_s, MOST_LATE_S)


def succeeded(work: Any) -> bool:
    """True if a collective has completed without error."""
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
) -> Exchange:
    """Makes an exchange; a collective call.

    Args:
        group: process group of all ranks.
        numel: number of elements of a message.
        dtype: dtype of the message.
        device: device of the message; shared memory is on the CPU.
        sides: number of independent buffers.
    """
    if group.shares_host and numel and group.world_size > 1:
        ranks = range(group.world_size)
        is_large = numel * dtype.itemsize * len(ranks) >= LEAST_BYTES
        sums = int(is_large and len(ranks) >= LEAST_RANKS)
        places = sides * len(ranks) + sums
        size_bytes = SharedExchange.size_bytes(len(ranks), numel, dtype, places)
        memory = map_together(group, size_bytes)
        if memory is not None:
            layout = numel, dtype
            return SharedExchange(group, memory, ranks, layout, sides, sums)
    return GlooExchange(group, numel, dtype, device, sides)


def agree_to_share(group: Group, own: bool) -> bool:
    """Agrees if all ranks can share memory within their hosts; a collective call.

    ``own`` is this rank's answer, which depends on its device and processor.
    """
    what = "agreeing whether memory may be shared"
    return group.world_size > 1 and all(gather_values(group, own, what))
