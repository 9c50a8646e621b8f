"""Connections among the ranks of a pipeline: discovery, agreement, common failure."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch

from elche.comm.control.control_channel import ControlChannel, heeds_key
from elche.comm.transport.device_group import (
    DeviceGroup,
    DeviceGroupConfig,
    Former,
    device_name,
    nccl_group,
    open_device_group,
)
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.events import Failed, Left
from elche.errors import (
    CommunicationError,
    ConfigError,
    DeadlineError,
    RemoteRankError,
)
from elche.pipeline.peers.device_messages import (
    CudaSideStream,
    DeviceMessages,
    SideStream,
    TwoWays,
    trial,
)
from elche.pipeline.peers.memory_lines import MemoryLines
from elche.pipeline.peers.rendezvous import Rendezvous, check_for_abort
from elche.pipeline.peers.stage_messages import NO_STEP_TAGS, Message
from elche.pipeline.peers.transport import LOOK_EVERY_S, Address, Transport
from elche.pipeline.peers.waits import REASON_WITHIN_S, Waits
from elche.pipeline.step.step_io import failure_of
from elche.runtime.process.connect import connect
from elche.runtime.process.environment import Placement

EXCHANGE_TAG = NO_STEP_TAGS
GATHER_TAG = EXCHANGE_TAG + 1
TIE_TAG = EXCHANGE_TAG + 2
VALUES_TAG = EXCHANGE_TAG + 4
_UNBLOCK_TAG = (EXCHANGE_TAG + 3) * 2
_LEAVE_S = 5.0
_DECLINE_S = 30.0
_BEYOND_S = 60.0
"""gloo's own timeout is beyond every deadline of ours, which know whom to name."""
_joined: Counter[tuple[tuple[str, int], bytes]] = Counter()


@dataclass(frozen=True)
class DeviceWay:
    """What carries tensors between devices.

    Attributes:
        form: makes torch's group for one way.
        name: names a device; "" for one that it does not serve.
        stream: makes what runs beside a device's computation.
    """

    form: Former = nccl_group
    name: Callable[[torch.device], str] = device_name
    stream: Callable[[torch.device], SideStream] = CudaSideStream


@final
class StagePeers:
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
        self._waits = Waits(channel, placement.rank, name)
        self.transport = Transport(backend, placement.rank, self._check, self._waits)
        self._channel = channel
        self._group = group
        self._name = name
        self._listen = placement.listen
        self._closed = False
        self._subgroups: list[Group] = []
        self._devices: DeviceGroup | None = None
        self._formed = 0

    @staticmethod
    def join(placement: Placement, timeout_s: float) -> StagePeers:
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
                Rendezvous(channel, placement.rank, timeout_s),
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
        peers = StagePeers(placement, channel, group, backend, f"pipeline/{number}")
        try:
            peers.share_memory(timeout_s)
        except BaseException:
            peers.close()
            raise
        return peers

    def share_memory(self, timeout_s: float) -> None:
        """Has messages to ranks of this host go through memory; on every rank.

        Raises:
            CommunicationError: a rank is gone, or did not come in time.
            RemoteRankError: the run has ended.
        """
        self.transport.memory = MemoryLines.open(
            self.rank,
            self.world_size,
            lambda told: self.exchange(told, timeout_s, "sharing memory"),
        )

    @staticmethod
    def decline(placement: Placement, error: BaseException) -> None:
        """Meets the others only to end the run: this rank cannot take part."""
        with contextlib.suppress(CommunicationError, ConfigError, RemoteRankError):
            StagePeers.join(placement, _DECLINE_S).fail(error)

    def exchange(
        self, value: Any, timeout_s: float, what: str, *, names_late: bool = False
    ) -> list[Any]:
        """Gives a value to all ranks, and gets theirs, in rank order.

        Args:
            value: of what msgpack can write.
            timeout_s: deadline.
            what: for messages.
            names_late: whether the log names a rank that is late long before that.

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
                message = self.transport.receive(each, timeout_s, names_late)
                values.append(message.structure)
            for each in others:
                self.transport.send(each, Message(structure=values), timeout_s)
            # Whoever leaves after this one leaves nobody without it.
            self.transport.flush(timeout_s)
            return values
        root = Address(0, EXCHANGE_TAG, what)
        self._expect([root])
        self.transport.send(root, Message(structure=value), timeout_s)
        message = self.transport.receive(root, timeout_s, names_late)
        found: list[Any] = message.structure
        return found

    def gather(self, part: Message, to: int, timeout_s: float) -> list[Message]:
        """Collects a message of each rank on one, in rank order; [] on the others."""
        what = "a rank's part of the model's state"
        if self.rank != to:
            self.transport.send(Address(to, GATHER_TAG, what), part, timeout_s)
            self.transport.flush(timeout_s)
            return []
        found = []
        for rank in range(self.world_size):
            address = Address(rank, GATHER_TAG, what)
            if rank == to:
                found.append(part)
                continue
            self._expect([address])
            found.append(self.transport.receive(address, timeout_s))
        return found

    def heeds_signals(self, heeds: bool) -> None:
        """Tells the launcher whether this rank ends well by itself when signalled."""
        self._channel.store_set(heeds_key(self.rank), b"1" if heeds else b"")

    def send(self, rank: int, tensors: list[torch.Tensor], timeout_s: float) -> None:
        """Sends tensors to one rank, which calls :meth:`receive`."""
        address = Address(rank, TIE_TAG, "tied parameters")
        self.transport.send(address, Message(tuple(tensors)), timeout_s)

    def receive(self, rank: int, timeout_s: float) -> tuple[torch.Tensor, ...]:
        """Receives what a rank has sent with :meth:`send`."""
        address = Address(rank, TIE_TAG, "tied parameters")
        self._expect([address])
        return self.transport.receive(address, timeout_s).tensors

    def form_groups(
        self, wanted: Sequence[tuple[int, ...]], timeout_s: float
    ) -> dict[tuple[int, ...], Group]:
        """Forms groups of some ranks each, for collectives; ends those formed before.

        Args:
            wanted: the ranks of each, ascending; the same on all ranks.
            timeout_s: deadline of forming each.

        Returns:
            Those that this rank is in. They end with the pipeline.

        Raises:
            CommunicationError: the ranks of one did not come together.
        """
        for old in self._subgroups:
            old.close()
        self._subgroups = []
        self._formed += 1
        groups = {}
        # In one order on all ranks: forming waits for all ranks of a group.
        for ranks in sorted(set(wanted)):
            if self.rank not in ranks:
                continue
            named = ",".join(map(str, ranks))
            groups[ranks] = Group.form(
                Rendezvous(self._channel, self.rank, timeout_s),
                ranks.index(self.rank),
                len(ranks),
                f"{self._name}/{self._formed}/{named}",
                self._listen,
                timeout_s + _BEYOND_S,
            )
            self._subgroups.append(groups[ranks])
        return groups

    def open_devices(
        self,
        device: torch.device,
        partners: frozenset[int],
        timeout_s: float,
        way: DeviceWay | None = None,
    ) -> None:
        """Has tensors of steps go from device to device where that serves all ranks.

        Call it on every rank.

        Args:
            device: this rank's.
            partners: ranks with which it shares an edge of the pipeline.
            timeout_s: deadline of forming it.
            way: None is NCCL.

        Raises:
            CommunicationError: the ranks did not come together.
            RemoteRankError: the run has ended.
        """
        way = way or DeviceWay()
        self._group.check = self._check
        self._devices = open_device_group(
            self._group,
            device,
            DeviceGroupConfig(
                timeout_s,
                form=TwoWays.former(way.form),
                name=way.name,
                attempt=trial(partners),
            ),
        )
        if self._devices is not None:
            self.transport.devices = DeviceMessages(
                *(self._devices.made, self.rank, partners, device),
                way.stream(device),
            )

    def wait(
        self, work: Any, ranks: Sequence[int], what: str, timeout_s: float
    ) -> None:
        """Waits for a collective of some ranks.

        Args:
            work: of torch.
            ranks: that take part.
            what: for messages.
            timeout_s: deadline.

        Raises:
            DeadlineError: it is not through in time; names who has not come to it.
            CommunicationError: a connection has failed.
            RemoteRankError: the run has ended.
        """
        others = [rank for rank in ranks if rank != self.rank]
        started_s = time.monotonic()
        is_long = False
        while not self._is_through(work, what):
            waited_s = time.monotonic() - started_s
            self._check()
            if waited_s > timeout_s / 2 and not is_long:
                is_long = True
                self._waits.begin_all(others, what)
            if waited_s > timeout_s:
                raise DeadlineError(
                    f"rank {self.rank} waited {timeout_s:.1f} s for {what}; "
                    f"{self._waits.explain_all(others)}"
                )
        if is_long:
            self._waits.end()

    def _is_through(self, work: Any, what: str) -> bool:
        was_over = work.is_completed()  # else it may end as the wait gives up
        try:
            work.wait(timedelta(seconds=LOOK_EVERY_S))
        except RuntimeError as error:
            if not was_over:
                return False  # the next look tells how it ended
            until_s = time.monotonic() + REASON_WITHIN_S
            while time.monotonic() < until_s:
                self._check()  # the reason may be on its way
                time.sleep(LOOK_EVERY_S)
            raise CommunicationError(
                f"rank {self.rank}: {what} failed: {error}; look at the other ranks' "
                "own output"
            ) from error
        return True

    def send_values(
        self, rank: int, message: Message, timeout_s: float, what: str
    ) -> None:
        """Sends values to a rank that calls `receive_values`."""
        address = Address(rank, VALUES_TAG, what)
        self.transport.send(address, message, timeout_s)

    def receive_values(self, rank: int, timeout_s: float, what: str) -> Message:
        """Receives what a rank has sent with :meth:`send_values`."""
        address = Address(rank, VALUES_TAG, what)
        self._expect([address])
        return self.transport.receive(address, timeout_s)

    def fail(self, error: BaseException) -> None:
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
        self.transport.end()
        if broken:
            self._unblock()
        self.transport.close()
        for group in self._subgroups:
            group.close()
        self._group.close()
        self._channel.close()
        if self._devices is not None:
            self._devices.close()  # last: the others have been told

    def _unblock(self) -> None:
        """Makes gloo give up every wait: one that runs out closes all connections."""
        for group in (self._group, *self._subgroups):
            other = (group.rank + 1) % group.world_size
            with contextlib.suppress(RuntimeError):
                work = group.point_to_point.recv(
                    [torch.zeros(1, device="cpu")], other, _UNBLOCK_TAG
                )
                work.wait(timedelta(milliseconds=1))

    def _expect(self, addresses: list[Address]) -> None:
        self.transport.expect(addresses)
        for each in addresses:
            self.transport.admit(each)

    def _check(self) -> None:
        check_for_abort(self._channel)
