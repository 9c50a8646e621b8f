"""Messages of a step from CUDA device to CUDA device, through NCCL.

The head of a message goes through gloo as ever, and says that its tensors come this
way. A transfer begins when the tensors are computed and the receiver has asked for
them, and no stream waits for one: the host looks whether it is through. So no kernel of
NCCL waits for what another rank computes, a device may be synchronised at any time, and
the deadlines are those of the host's waits.

Never run on hardware: what is tested is the way of a message, with another backend in
NCCL's place and the CPU in the devices'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol, final

import torch
from torch import distributed as dist

from elche.comm.transport.device_group import TRIED_ELEMENTS, Former, end_at_once
from elche.comm.transport.process_group import Group


class SideStream(Protocol):
    """Where a device does something beside what it computes."""

    def computed(self) -> Callable[[], bool]:
        """Tells later whether the device is through with what it has been given."""

    def beside(self) -> AbstractContextManager[Any]:
        """What begins and is allocated in this context is beside the computation."""

    def hand_over(self, tensor: torch.Tensor) -> None:
        """The computation uses a tensor that was allocated beside it."""


@final
class CudaSideStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def computed(self) -> Callable[[], bool]:
        """Tells later whether the device is through with what it has been given."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def beside(self) -> AbstractContextManager[Any]:
        """What begins and is allocated in this context is beside the computation."""
        return torch.cuda.stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """The computation uses a tensor that was allocated beside it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@final
class TwoWays:
    """Torch's groups for messages to higher ranks, and to lower ones.

    NCCL carries out the transfers of a group between two ranks one after the other:
    in one group for both ways, two ranks that send at once would wait for each other.
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
    """What tries both ways with each partner; it returns what went wrong.

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
class DeviceMessages:
    """Transfers between this rank's device and those of its partners.

    Args:
        ways: formed and tried.
        rank: this rank.
        partners: ranks with which they were tried.
        device: this rank's.
        stream: beside its computation.
    """

    def __init__(
        self,
        ways: TwoWays,
        rank: int,
        partners: frozenset[int],
        device: torch.device,
        stream: SideStream,
    ) -> None:
        self._ways = ways
        self._rank = rank
        self._partners = partners
        self._device = device
        self.stream = stream

    def serves(self, rank: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a message to that rank may go this way."""
        kind = self._device.type
        here = all(one.device.type == kind for one in tensors)
        return bool(tensors) and here and self.reaches(rank)

    def reaches(self, rank: int) -> bool:
        """Whether messages of steps to that rank are announced by gloo."""
        return rank in self._partners

    def send(self, tensors: Sequence[torch.Tensor], rank: int) -> list[Any]:
        """Begins to send what is computed to a rank that receives it already."""
        way = self._ways.way(self._rank, rank)
        with self.stream.beside():
            return [way.send([each], rank, 0) for each in _as_bytes(tensors)]

    def receive(
        self, like: Sequence[torch.Tensor], rank: int
    ) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """Begins to receive; tensors of these shapes on the device, and the works."""
        way = self._ways.way(rank, self._rank)
        with self.stream.beside():
            found = tuple(torch.empty_like(one, device=self._device) for one in like)
            return found, [way.recv([one], rank, 0) for one in _as_bytes(found)]

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """The computation uses what was received; may be given the host's tensors."""
        for one in tensors:
            if one.device.type == self._device.type:
                self.stream.hand_over(one)

    def finish(self, works: Sequence[Any]) -> None:
        """Raises what went wrong in transfers that are completed."""
        with self.stream.beside():  # NCCL lets this stream wait, for nothing
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
