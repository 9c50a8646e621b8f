"""Transfer of a step's tensors between devices through their own backend.

A message's head is sent through gloo and announces that its tensors follow through
NCCL. A transfer begins when the tensors are computed and the receiver is ready. The
host polls it, and no stream waits for it. So no NCCL kernel waits for another rank's
computation, a device may be synchronised at any time, and the host's deadlines apply.

A device may run one transfer at a time: two ranks that received first, each from the
other, would wait forever. So a transfer holds the :attr:`DeviceMessages.turn` of both
ranks. The lower rank's turn is taken first, so no ranks wait in a circle.

Run on the test device only, never on real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from elche.comm.transport.device_group import TRIED_ELEMENTS, Attempt
from elche.comm.transport.process_group import Group
from elche.devices import streams


class SideStream:
    """A side stream, separate from a device's computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def computed(self) -> Callable[[], bool]:
        """Returns a poll for the completion of all work submitted to the device."""
        return streams.record_event(self._device).query

    def beside(self) -> AbstractContextManager[Any]:
        """Context whose work and allocations use the side stream."""
        return streams.beside(self._stream)

    def mark_used(self, tensor: torch.Tensor) -> None:
        """Marks a tensor allocated in `beside` as used by the computation."""
        tensor.record_stream(streams.current_stream(self._device))


def trial(partners: Iterable[int]) -> Attempt:
    """Returns a trial of both directions with each partner; it returns its error or "".

    NCCL connects two ranks in their first transfer, and waits there without a deadline.
    """

    def attempt(made: Any, group: Group, device: torch.device) -> str:
        mine = group.rank
        # Same order of pairs on all ranks, because each waits for its partner.
        pairs = sorted((min(mine, one), max(mine, one)) for one in partners)
        for low, high in pairs:
            for sender, receiver in ((low, high), (high, low)):
                value = sender + 1.0 if mine == sender else 0.0
                found = torch.full((TRIED_ELEMENTS,), value, device=device)
                if mine == sender:
                    made.send([found], receiver, 0).wait()
                else:
                    made.recv([found], sender, 0).wait()
                if found.tolist() != [sender + 1.0] * TRIED_ELEMENTS:
                    return f"expected {sender + 1.0} of rank {sender}, got {found[0]}"
        return ""

    return attempt


@final
@dataclass(frozen=True)
class DeviceMessages:
    """Transfers between this rank's device and those of its partners.

    Attributes:
        made: torch's group of the devices, formed and tried.
        rank: index of this rank.
        partners: ranks with which the group was tried.
        device: device of this rank.
        stream: side stream of the device.
        turn: held during a transfer, since a device may run one at a time.
    """

    made: Any
    rank: int
    partners: frozenset[int]
    device: torch.device
    stream: SideStream
    turn: threading.Lock = field(default_factory=threading.Lock)

    def serves(self, rank: int, tensors: Sequence[torch.Tensor]) -> bool:
        """True if these tensors can be sent to a rank from device to device."""
        here = all(one.device.type == self.device.type for one in tensors)
        return bool(tensors) and here and rank in self.partners

    def send(self, tensors: Sequence[torch.Tensor], rank: int) -> list[Any]:
        """Begins to send computed tensors to a rank that is already receiving."""
        with self.stream.beside():
            return [self.made.send([each], rank, 0) for each in _as_bytes(tensors)]

    def receive(
        self, like: Sequence[torch.Tensor], rank: int
    ) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """Begins to receive; returns tensors of these shapes, and the work handles."""
        with self.stream.beside():
            found = tuple(torch.empty_like(one, device=self.device) for one in like)
            return found, [self.made.recv([one], rank, 0) for one in _as_bytes(found)]

    def mark_used(self, tensors: Sequence[torch.Tensor]) -> None:
        """Marks received device tensors as used by the computation."""
        for one in tensors:
            if one.device.type == self.device.type:
                self.stream.mark_used(one)

    def finish(self, works: Sequence[Any]) -> None:
        """Raises the errors of completed transfers."""
        for work in works:
            work.wait()


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views tensors as flat bytes, because NCCL supports fewer dtypes than torch.

    Strides are set explicitly, since a one-element tensor may have any.
    """
    return [
        one.as_strided((one.numel(),), (1,)).view(torch.uint8)
        for one in tensors
        if one.numel()
    ]
