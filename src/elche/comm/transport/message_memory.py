"""Messages between two ranks of one host in shared memory.

No threads are involved: the sender writes, and the receiver reads whenever it waits. So
a message costs two copies and wakes no thread. gloo's threads would compete with the
computation for cores.

Each direction has its own memory, created by the sender::

    written  taken  closed  slot_bytes │ slot 0 │ slot 1 │ ... │ slot 7
                                         tag  head's length  head  tensors

A message's slot is its number modulo the number of slots. The sender increments
``written`` after filling a slot, the receiver ``taken`` after copying one. Slots grow
for a larger message once all are read. Pages of messages between steps, such as a whole
model's state, are returned to the system at once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Final, final

import torch

from elche.comm.transport.messages import BETWEEN_STEPS, Message, Packed, read_head
from elche.comm.transport.shared_memory import (
    aligned,
    host_number,
    may_share_memory,
    new_memory,
    open_memory,
)

SLOTS: Final = 8
"""Most unread messages from one rank to another."""
_WRITTEN, _TAKEN, _CLOSED, _SLOT_BYTES = range(4)
_WORD_BYTES: Final = 8
_HEADER_BYTES: Final = 4096
_TOKEN_AT: Final = _HEADER_BYTES - _WORD_BYTES
_FIRST_BYTES: Final = 1 << 16


class _MappedSlots:
    """One direction's memory, mapped by either end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._slot_bytes = 0
        self._map()

    def _map(self) -> None:
        size_bytes = _HEADER_BYTES + SLOTS * self._slot_bytes
        self._memory = mmap.mmap(self.descriptor, size_bytes)
        self._words = memoryview(self._memory).cast("q")

    def _slot(self, number: int) -> int:
        """Returns the offset of a message's slot."""
        return _HEADER_BYTES + number % SLOTS * self._slot_bytes

    def _tensor(self, like: torch.Tensor, at: int) -> torch.Tensor:
        """Returns a tensor in the memory with the shape and dtype of ``like``."""
        if not like.numel():
            return torch.empty_like(like, device="cpu")
        count = like.numel()
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=count, offset=at)
        return flat.view(like.shape)

    def _give_back(self, begin: int, end: int) -> None:
        """Returns whole pages to the system until the next write."""
        page = mmap.PAGESIZE
        begin, end = -(-begin // page) * page, end // page * page
        if end > begin:
            self._memory.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Closes the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@final
class OutgoingMemory(_MappedSlots):
    """The sender's end of one direction.

    Attributes:
        offer: host, process ID, descriptor and token with which the receiver opens it.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        descriptor, token = new_memory(_TOKEN_AT)
        self.offer = [host_number(), os.getpid(), descriptor, token]
        super().__init__(descriptor)
        self._grow(_FIRST_BYTES)

    @property
    def pending(self) -> int:
        """Number of unread messages."""
        return self._words[_WRITTEN] - self._words[_TAKEN]

    def send(self, tag: int, packed: Packed) -> bool:
        """Writes a message; returns False if there is no room for it now."""
        size_bytes = _begin(len(packed.head)) + sum(
            aligned(one.nbytes) for one in packed.tensors
        )
        must_grow = size_bytes > self._slot_bytes
        if self.pending >= (1 if must_grow else SLOTS):
            return False
        if must_grow:
            self._grow(aligned(size_bytes))
        number = self._words[_WRITTEN]
        at = self._slot(number)
        begin, length = at + _begin(0), len(packed.head)
        self._words[at // _WORD_BYTES] = tag
        self._words[at // _WORD_BYTES + 1] = length
        self._memory[begin : begin + length] = packed.head
        at += _begin(length)
        for tensor in packed.tensors:
            self._tensor(tensor, at).copy_(tensor)
            at += aligned(tensor.nbytes)
        self._words[_WRITTEN] = number + 1
        return True

    def close(self) -> None:
        """Marks the direction as closed for the receiver."""
        self._words[_CLOSED] = 1
        super().close()

    def _grow(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        os.ftruncate(self.descriptor, _HEADER_BYTES + SLOTS * slot_bytes)
        self._map()
        self._words[_SLOT_BYTES] = slot_bytes


@final
class IncomingMemory(_MappedSlots):
    """The receiver's end of one direction."""

    @staticmethod
    def open(offer: list[int]) -> IncomingMemory | None:
        """Opens the memory that a sender offers; None if it is not accessible."""
        host, pid, number, token = offer
        if host != host_number():
            return None
        descriptor = open_memory(pid, number, token, _TOKEN_AT)
        return None if descriptor is None else IncomingMemory(descriptor)

    @property
    def is_closed(self) -> bool:
        """True if the sender has closed the direction."""
        return bool(self._words[_CLOSED])

    def read(self) -> Iterator[tuple[int, Message]]:
        """Copies arrived messages; yields each with its tag."""
        number = self._words[_TAKEN]
        while number < self._words[_WRITTEN]:
            if self._slot_bytes != self._words[_SLOT_BYTES]:
                self._slot_bytes = self._words[_SLOT_BYTES]
                self._map()
            begin = at = self._slot(number)
            tag = self._words[at // _WORD_BYTES]
            length = self._words[at // _WORD_BYTES + 1]
            head = self._memory[at + _begin(0) : at + _begin(0) + length]
            message, _ = read_head(head)
            at += _begin(length)
            for one in message.tensors:
                one.copy_(self._tensor(one, at))
                at += aligned(one.nbytes)
            if tag >= BETWEEN_STEPS:
                self._give_back(begin, at)
            number += 1
            self._words[_TAKEN] = number
            yield tag, message


def open_message_memory(
    rank: int, world_size: int, exchange: Callable[[str], list[str]]
) -> dict[int, tuple[OutgoingMemory, IncomingMemory]]:
    """Opens both directions to each rank with shared memory; a collective call.

    Args:
        rank: index of this rank.
        world_size: number of ranks.
        exchange: gathers a text from every rank, in rank order.
    """
    outgoing: dict[int, OutgoingMemory] = {}
    incoming: dict[int, IncomingMemory] = {}
    with contextlib.suppress(OSError):
        for other in range(world_size if may_share_memory() else 0):
            if other != rank:
                outgoing[other] = OutgoingMemory()
    offers = exchange(json.dumps({to: one.offer for to, one in outgoing.items()}))
    for sender, text in enumerate(offers):
        offer = json.loads(text).get(str(rank))
        opened = None if offer is None else IncomingMemory.open(offer)
        if opened is not None:
            incoming[sender] = opened
    reached = exchange(json.dumps([*incoming]))
    both = {r for r in incoming if rank in json.loads(reached[r]) and r in outgoing}
    for other in outgoing.keys() - both:
        outgoing[other].close()
    for other in incoming.keys() - both:
        incoming[other].close()
    return {other: (outgoing[other], incoming[other]) for other in both}


def _begin(length: int) -> int:
    """Returns the size of tag, length and head, which precede a slot's tensors."""
    return aligned(2 * _WORD_BYTES + length) if length else 2 * _WORD_BYTES
