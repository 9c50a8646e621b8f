"""Messages between two ranks of one host, through memory that both map.

No thread carries them: the sender writes, and the receiver reads while it waits for
anything, so that a message costs two copies and wakes nobody. gloo's threads, and those
that wait in it, would take turns with the computation on cores that it fills.

One piece of memory for each way, made by the sender::

    written  taken  closed  slot_bytes │ slot 0 │ slot 1 │ ... │ slot 7
                                         tag  head's length  head  tensors

A message's slot is its number modulo their count. The sender raises ``written`` when
it has filled one, the receiver ``taken`` when it has copied it. Slots grow to hold a
larger message when all are taken; what lay there between steps, as a whole model's
state may, is given back to the system at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch

from elche.comm.transport.shared_memory import (
    aligned,
    host_number,
    may_share_memory,
    new_memory,
    open_memory,
)
from elche.pipeline.peers.stage_messages import (
    NO_STEP_TAGS,
    Message,
    head_of,
    read_head,
)

SLOTS: Final = 8
"""Messages that one rank may have sent to another before it has taken any."""
_WRITTEN, _TAKEN, _CLOSED, _SLOT_BYTES = range(4)
_WORD_BYTES: Final = 8
_HEADER_BYTES: Final = 4096
_TOKEN_AT: Final = _HEADER_BYTES - _WORD_BYTES
_FIRST_BYTES: Final = 1 << 16


@final
class Letter:
    """A message as it lies in a slot.

    Args:
        message: it.

    Attributes:
        head: its description.
        tensors: of it.
        size_bytes: of all.
    """

    def __init__(self, message: Message) -> None:
        self.head = head_of(message)
        self.tensors = message.tensors
        self.size_bytes = _begin(len(self.head)) + sum(
            aligned(one.nbytes) for one in self.tensors
        )


@final
class OutgoingMemory:
    """The sender's end of one way.

    Raises:
        OSError: there is no such memory here.
    """

    def __init__(self) -> None:
        self._descriptor, token = new_memory(_TOKEN_AT)
        self.offer = [host_number(), os.getpid(), self._descriptor, token]
        self._grow(_FIRST_BYTES)

    @property
    def pending(self) -> int:
        """Messages that have not been taken."""
        return self._words[_WRITTEN] - self._words[_TAKEN]

    def has_room(self, letter: Letter) -> bool:
        """Whether it can be sent now."""
        most = SLOTS if letter.size_bytes <= self._slot_bytes else 1
        return self.pending < most

    def send(self, tag: int, letter: Letter) -> None:
        """Writes a message for which there is room."""
        if letter.size_bytes > self._slot_bytes:
            self._grow(aligned(letter.size_bytes))
        number = self._words[_WRITTEN]
        at = _slot(number, self._slot_bytes)
        begin, length = at + _begin(0), len(letter.head)
        self._words[at // _WORD_BYTES] = tag
        self._words[at // _WORD_BYTES + 1] = length
        self._memory[begin : begin + length] = letter.head
        at += _begin(length)
        for tensor in letter.tensors:
            _in_memory(self._memory, tensor, at).copy_(tensor.detach())
            at += aligned(tensor.nbytes)
        self._words[_WRITTEN] = number + 1

    def empty(self) -> None:
        """Gives its memory back to the system; all that was sent has been taken.

        The receiver may not: the next message may be on its way into it.
        """
        _give_back(self._memory, _HEADER_BYTES, len(self._memory))

    def close(self) -> None:
        """The receiver sees that no more comes."""
        self._words[_CLOSED] = 1
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _grow(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        size_bytes = _HEADER_BYTES + SLOTS * slot_bytes
        os.ftruncate(self._descriptor, size_bytes)
        self._memory = mmap.mmap(self._descriptor, size_bytes)
        self._words = memoryview(self._memory).cast("q")
        self._words[_SLOT_BYTES] = slot_bytes


@final
class IncomingMemory:
    """The receiver's end of one way.

    Args:
        descriptor: of the sender's memory; closed by `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._slot_bytes = 0
        self._memory = mmap.mmap(descriptor, _HEADER_BYTES)
        self._words = memoryview(self._memory).cast("q")
        self._arrived: dict[int, deque[Message]] = defaultdict(deque)

    @staticmethod
    def open(offer: list[int]) -> IncomingMemory | None:
        """Opens what a sender offers; None where that is out of reach."""
        host, pid, number, token = offer
        if host != host_number():
            return None
        descriptor = open_memory(pid, number, token, _TOKEN_AT)
        return None if descriptor is None else IncomingMemory(descriptor)

    @property
    def is_closed(self) -> bool:
        """Whether no more comes."""
        return bool(self._words[_CLOSED])

    @property
    def untaken(self) -> int:
        """Messages that have come and were not asked for."""
        return sum(map(len, self._arrived.values()))

    def poll(self) -> None:
        """Copies what has come."""
        number = self._words[_TAKEN]
        while number < self._words[_WRITTEN]:
            if self._slot_bytes != self._words[_SLOT_BYTES]:
                self._map()
            at = _slot(number, self._slot_bytes)
            tag, message, end = self._read(at)
            if tag >= NO_STEP_TAGS:
                _give_back(self._memory, at, end)
            self._arrived[tag].append(message)
            number += 1
            self._words[_TAKEN] = number

    def has(self, tag: int) -> bool:
        """Whether a message has come."""
        return bool(self._arrived.get(tag))

    def take(self, tag: int) -> Message:
        """A message that has come."""
        waiting = self._arrived[tag]
        message = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        return message

    def close(self) -> None:
        """Gives the memory up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _map(self) -> None:
        self._slot_bytes = self._words[_SLOT_BYTES]
        size_bytes = _HEADER_BYTES + SLOTS * self._slot_bytes
        self._memory = mmap.mmap(self._descriptor, size_bytes)
        self._words = memoryview(self._memory).cast("q")

    def _read(self, at: int) -> tuple[int, Message, int]:
        """The message of a slot, with its tag, and where it ends."""
        tag, length = self._words[at // _WORD_BYTES], self._words[at // _WORD_BYTES + 1]
        begin = at + _begin(0)
        head = read_head(self._memory[begin : begin + length])
        at += _begin(length)
        for buffer in head.buffers:
            buffer.copy_(_in_memory(self._memory, buffer, at))
            at += aligned(buffer.nbytes)
        message = Message(head.buffers, head.structure, head.needs_grad, head.failure)
        return tag, message, at


@final
class MemoryLines:
    """This rank's ways to and from the others of its host.

    Args:
        outgoing: by rank.
        incoming: of the same ranks.
    """

    def __init__(
        self,
        outgoing: Mapping[int, OutgoingMemory],
        incoming: Mapping[int, IncomingMemory],
    ) -> None:
        self.outgoing, self.incoming = dict(outgoing), dict(incoming)

    @staticmethod
    def open(
        rank: int, world_size: int, exchange: Callable[[Any], list[Any]]
    ) -> MemoryLines:
        """Opens a way to each rank that can map this one's memory, and the other way.

        Args:
            rank: this rank.
            world_size: of all ranks, which all call this.
            exchange: gives a value to all ranks, and gets theirs, in rank order.
        """
        outgoing: dict[int, OutgoingMemory] = {}
        with contextlib.suppress(OSError):
            for other in range(world_size if may_share_memory() else 0):
                if other != rank:
                    outgoing[other] = OutgoingMemory()
        told = exchange([[to, line.offer] for to, line in outgoing.items()])
        opened = {
            sender: IncomingMemory.open(offer)
            for sender, offers in enumerate(told)
            for to, offer in offers
            if to == rank
        }
        incoming = {r: line for r, line in opened.items() if line is not None}
        reached = exchange([*incoming])
        both = {other for other in incoming if rank in reached[other]}
        for other in outgoing.keys() - both:
            outgoing.pop(other).close()
        for other in incoming.keys() - both:
            incoming.pop(other).close()
        return MemoryLines(outgoing, incoming)

    def poll(self) -> None:
        """Copies what has come from any of them: none waits for room for ever."""
        for line in self.incoming.values():
            line.poll()

    def close(self) -> None:
        """Ends all of them."""
        for line in self.outgoing.values():
            line.close()
        for other in self.incoming.values():
            other.close()
        # Else the memory stays until the garbage collector comes by.
        self.outgoing, self.incoming = {}, {}


def _give_back(memory: mmap.mmap, begin: int, end: int) -> None:
    """Has no memory behind whole pages, until they are written again."""
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if end > begin:
        memory.madvise(mmap.MADV_REMOVE, begin, end - begin)


def _slot(number: int, slot_bytes: int) -> int:
    """Where the slot of a message begins."""
    return _HEADER_BYTES + number % SLOTS * slot_bytes


def _begin(length: int) -> int:
    """Bytes of a slot before its tensors, with a head of this length."""
    return aligned(2 * _WORD_BYTES + length) if length else 2 * _WORD_BYTES


def _in_memory(memory: mmap.mmap, like: torch.Tensor, at: int) -> torch.Tensor:
    """A tensor of the shape and dtype of another, at a place in the memory."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=at)
    return flat.view(like.shape)
