"""Tensors of a step from CUDA device to CUDA device, through NCCL.

gloo carries the head of a message, which says that its tensors come this way. A
transfer begins when the tensors are computed and the receiver has asked for them, and
no stream waits for one: the host polls it. So no kernel of NCCL waits for another
rank's computation, a device may be synchronised at any time, and the deadlines are
those of the host's waits.

Never run on hardware: tests carry the messages with another backend in NCCL's place
and the CPU in the devices'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
from torch import distributed as dist

from elche.comm.transport.device_group import (
    TRIED_ELEMENTS,
    Former,
    end_at_once,
)
from elche.comm.transport.process_group import Group


class SideStream:
    """A stream beside the computation of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def computed(self) -> Callable[[], bool]:
        """Returns a poll for the end of all that the device has been given."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def beside(self) -> AbstractContextManager[Any]:
        """Context whose work and allocations are beside the computation."""
        return torch.cuda.stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Marks a tensor allocated in `beside` as used by the computation."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@final
class TwoWays:
    """Torch's groups for messages to higher ranks, and to lower ones.

    NCCL carries out the transfers of a group between two ranks one after the other:
    in one group for both directions, two ranks that send at once would wait for each
    other.
    """

    def __init__(self, up: Any, down: Any) -> None:
        self._up, self._down = up, down

    @staticmethod
    def former(form: Former) -> Former:
        """Forms both as `form` forms one."""

        def both(
            store: dist.Store, rank: int, size: int, deadline: timedelta
        ) -> TwoWays:
            stores = (dist.PrefixStore(name, store) for name in ("up/", "down/"))
            return TwoWays(*(form(each, rank, size, deadline) for each in stores))

        return both

    def way(self, sender: int, receiver: int) -> Any:
        """The group of a message."""
        return self._up if sender < receiver else self._down

    def abort(self) -> None:
        """Ends both at once."""
        end_at_once(self._up)
        end_at_once(self._down)


def trial(partners: Iterable[int]) -> Callable[[TwoWays, Group, torch.device], str]:
    """A test of both directions with each partner; it returns an error, "" if none.

    NCCL connects two ranks in their first transfer, and waits there without a deadline.
    """

    def attempt(made: TwoWays, group: Group, device: torch.device) -> str:
        mine = group.rank
        # One order of pairs for all ranks: each waits for its partner.
        pairs = sorted((min(mine, one), max(mine, one)) for one in partners)
        for low, high in pairs:
            for sender, receiver in ((low, high), (high, low)):
                value = sender + 1.0 if mine == sender else 0.0
                found = torch.full((TRIED_ELEMENTS,), value, device=device)
                way = made.way(sender, receiver)
                if mine == sender:
                    way.send([found], receiver, 0).wait()
                else:
                    way.recv([found], sender, 0).wait()
                if found.tolist() != [sender + 1.0] * TRIED_ELEMENTS:
                    return f"expected {sender + 1.0} of rank {sender}, got {found[0]}"
        return ""

    return attempt


@final
@dataclass(frozen=True)
class DeviceMessages:
    """Transfers between this rank's device and those of its partners.

    Attributes:
        ways: formed and tried.
        rank: this rank.
        partners: ranks with which they were tried.
        device: this rank's.
        stream: beside its computation.
    """

    ways: TwoWays
    rank: int
    partners: frozenset[int]
    device: torch.device
    stream: SideStream

    def serves(self, rank: int, tensors: Sequence[torch.Tensor]) -> bool:
        """True if these tensors may be sent to that rank from device to device."""
        here = all(one.device.type == self.device.type for one in tensors)
        return bool(tensors) and here and rank in self.partners

    def send(self, tensors: Sequence[torch.Tensor], rank: int) -> list[Any]:
        """Begins to send computed tensors to a rank that receives already."""
        way = self.ways.way(self.rank, rank)
        with self.stream.beside():
            return [way.send([each], rank, 0) for each in _as_bytes(tensors)]

    def receive(
        self, like: Sequence[torch.Tensor], rank: int
    ) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """Begins to receive; tensors of these shapes on the device, and the works."""
        way = self.ways.way(rank, self.rank)
        with self.stream.beside():
            found = tuple(torch.empty_like(one, device=self.device) for one in like)
            return found, [way.recv([one], rank, 0) for one in _as_bytes(found)]

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Marks received tensors as used by the computation; skips the host's."""
        for one in tensors:
            if one.device.type == self.device.type:
                self.stream.hand_over(one)

    def finish(self, works: Sequence[Any]) -> None:
        """Raises the errors of completed transfers."""
        with self.stream.beside():  # the side stream waits for NCCL's, for nothing
            for work in works:
                work.wait()


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """NCCL knows fewer kinds of numbers than torch.

    Strides are set, since a dense tensor of one element may have any.
    """
    return [
        one.as_strided((one.numel(),), (1,)).view(torch.uint8)
        for one in tensors
        if one.numel()
    ]
