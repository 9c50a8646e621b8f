"""The ranks of a pipeline: how they find each other, agree, and fail together."""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import timedelta
from typing import Any, final

import torch

from elche.comm.control_channel import ControlChannel
from elche.comm.process_group import Group
from elche.coordination.messages import Failed, Left
from elche.errors import CommunicationError, RemoteRankError
from elche.pipeline.executor import failure_of
from elche.pipeline.messages import Message
from elche.pipeline.transport import Address, Transport
from elche.runtime.connect import connect
from elche.runtime.environment import Placement

EXCHANGE_TAG = 1 << 26
GATHER_TAG = EXCHANGE_TAG + 1
TIE_TAG = EXCHANGE_TAG + 2
_UNBLOCK_TAG = (EXCHANGE_TAG + 3) * 2
_TELL_S = 1.0
_LEAVE_S = 5.0
_BEYOND_S = 60.0
"""gloo's own timeout is beyond every deadline of ours, which know whom to name."""
_joined: Counter[tuple[tuple[str, int], bytes]] = Counter()


@final
class Peers:
    """This rank among the others; made by :meth:`join`.

    Args:
        placement: this process's place.
        channel: to the coordinator, for the rendezvous and for failures.
        group: the process group.
        backend: torch's object inside it.
        name: of this pipeline in the coordinator's store.
    """

    def __init__(
        self,
        placement: Placement,
        channel: ControlChannel,
        group: Group,
        backend: Any,
        name: str,
    ) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.transport = Transport(
            backend,
            placement.rank,
            self._check,
            _Waits(channel, placement.rank, name),
        )
        self._channel = channel
        self._group = group
        self._backend = backend
        self._closed = False

    @staticmethod
    def join(placement: Placement, timeout_s: float) -> Peers:
        """Meets all ranks of the run.

        Raises:
            CommunicationError: they did not come together in time.
        """
        placement, channel = connect(placement, timeout_s)
        assert placement.coordinator is not None
        number = _joined[placement.coordinator, placement.key] + 1
        _joined[placement.coordinator, placement.key] = number
        try:
            group = Group.form(
                channel,
                placement.rank,
                placement.world_size,
                -number,  # generations of a data-parallel run count up
                placement.listen,
                timeout_s + _BEYOND_S,
            )
        except BaseException:
            channel.close()
            raise
        backend = group.point_to_point
        return Peers(placement, channel, group, backend, f"pipeline/{number}")

    def exchange(self, value: Any, timeout_s: float, what: str) -> list[Any]:
        """Gives a value to all ranks, and gets theirs, in rank order.

        Args:
            value: of what msgpack can write.
            timeout_s: deadline.
            what: for messages.

        Raises:
            DeadlineError: a rank did not come in time.
            CommunicationError: a rank is gone.
            RemoteRankError: the run has ended.
        """
        if self.rank == 0:
            others = [Address(r, EXCHANGE_TAG, what) for r in range(1, self.world_size)]
            self._expect(others)
            values = [value]
            for each in others:
                values.append(self.transport.receive(each, timeout_s).structure)
            for each in others:
                self.transport.send(each, Message(structure=values), timeout_s)
            # Whoever leaves after this one leaves nobody without it.
            self.transport.flush(timeout_s)
            return values
        root = Address(0, EXCHANGE_TAG, what)
        self._expect([root])
        self.transport.send(root, Message(structure=value), timeout_s)
        found: list[Any] = self.transport.receive(root, timeout_s).structure
        return found

    def gather(
        self, tensors: dict[str, torch.Tensor], to: int, timeout_s: float
    ) -> dict[str, torch.Tensor]:
        """Collects named tensors of all ranks on one; empty on the others."""
        what = "the parameters of a rank"
        if self.rank != to:
            message = Message(tuple(tensors.values()), list(tensors))
            self.transport.send(Address(to, GATHER_TAG, what), message, timeout_s)
            self.transport.flush(timeout_s)
            return {}
        found = dict(tensors)
        for rank in range(self.world_size):
            if rank == to:
                continue
            address = Address(rank, GATHER_TAG, what)
            self._expect([address])
            message = self.transport.receive(address, timeout_s)
            found.update(zip(message.structure, message.tensors, strict=True))
        return found

    def send(self, rank: int, tensors: list[torch.Tensor], timeout_s: float) -> None:
        """Sends tensors to one rank, which calls :meth:`receive`."""
        address = Address(rank, TIE_TAG, "tied parameters")
        self.transport.send(address, Message(tuple(tensors)), timeout_s)

    def receive(self, rank: int, timeout_s: float) -> tuple[torch.Tensor, ...]:
        """Receives what a rank has sent with :meth:`send`."""
        address = Address(rank, TIE_TAG, "tied parameters")
        self._expect([address])
        return self.transport.receive(address, timeout_s).tensors

    def fail(self, error: Exception) -> None:
        """Ends the run for all ranks: messages do not work any more."""
        if not self._closed and not isinstance(error, RemoteRankError):
            failure = failure_of(self.rank, error)
            with contextlib.suppress(CommunicationError):
                self._channel.send(
                    Failed(
                        rank=self.rank,
                        error=failure.text,
                        traceback=failure.traceback,
                    )
                )
        self._end(broken=True)

    def close(self) -> None:
        """Leaves. Call it on every rank; may be called twice."""
        if not self._closed:
            with contextlib.suppress(CommunicationError, RemoteRankError):
                self.transport.flush(_LEAVE_S)
                self._channel.send(Left(rank=self.rank))
        self._end(broken=False)

    def _end(self, broken: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with self.transport.condition:
            self.transport.closed = True
        if broken:
            self._unblock()
        self.transport.close()
        self._group.close()
        self._backend = None
        self._channel.close()

    def _unblock(self) -> None:
        """Makes gloo give up every wait: one that runs out closes all connections."""
        other = (self.rank + 1) % self.world_size
        with contextlib.suppress(RuntimeError):
            work = self._backend.recv([torch.zeros(1)], other, _UNBLOCK_TAG)
            work.wait(timedelta(milliseconds=1))

    def _expect(self, addresses: list[Address]) -> None:
        self.transport.expect(addresses)
        for each in addresses:
            self.transport.admit(each)

    def _check(self) -> None:
        abort = self._channel.find_abort()
        if abort is not None:
            raise RemoteRankError(abort.reason, abort.failed_rank, abort.traceback)


@final
class _Waits:
    """Who waits for whom, told through the coordinator.

    Every rank publishes its long waits. One that is waited for and publishes nothing
    is the one that is late.
    """

    def __init__(self, channel: ControlChannel, rank: int, name: str) -> None:
        self._channel = channel
        self._rank = rank
        self._name = name

    def begin(self, rank: int, what: str) -> None:
        """See `LongWaits`."""
        self._publish(f"{rank} {what}")

    def end(self) -> None:
        """See `LongWaits`."""
        self._publish("")

    def explain(self, rank: int) -> str:
        """See `LongWaits`."""
        seen = [self._rank]
        while rank not in seen:
            seen.append(rank)
            try:
                told = self._channel.store_get(self._key(rank), _TELL_S).decode()
            except CommunicationError:
                told = ""
            if not told:
                return f"rank {rank} is late, and waits for nobody"
            rank = int(told.partition(" ")[0])
        chain = " and ".join(f"rank {one}" for one in seen)
        return f"{chain} wait for each other"

    def _publish(self, text: str) -> None:
        with contextlib.suppress(CommunicationError):
            self._channel.store_set(self._key(self._rank), text.encode())

    def _key(self, rank: int) -> str:
        return f"{self._name}/waits/{rank}"
