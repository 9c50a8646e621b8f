"""Connections among the ranks of a pipeline: discovery, agreement, common failure."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch

from elche.comm.control.control_channel import ControlChannel, heeds_key
from elche.comm.transport.device_group import (
    DeviceGroup,
    DeviceGroupConfig,
    open_device_group,
)
from elche.comm.transport.device_messages import DeviceMessages, SideStream, trial
from elche.comm.transport.exchange import agree_to_share
from elche.comm.transport.gloo_lines import end_waits
from elche.comm.transport.message_memory import open_message_memory
from elche.comm.transport.messages import BETWEEN_STEPS, Address, Message
from elche.comm.transport.point_to_point import LOOK_EVERY_S, PointToPoint
from elche.comm.transport.process_group import (
    SLEEP_S,
    Group,
    gather_texts,
)
from elche.coordination.protocol.events import (
    CheckpointSaved,
    Failed,
    Left,
    ReplicasFormed,
)
from elche.coordination.protocol.instructions import Regroup
from elche.devices.backends import form_group
from elche.errors import (
    CommunicationError,
    ConfigError,
    RankLostError,
    RemoteRankError,
)
from elche.pipeline.peers.waits import BEYOND_S, Waits
from elche.runtime.process.connect import connect
from elche.runtime.process.environment import Placement

logger = logging.getLogger(__name__)

_LEAVE_S = 5.0
_DECLINE_S = 30.0
_joined: Counter[tuple[tuple[str, int], bytes]] = Counter()
_reduced: set[tuple[tuple[str, int] | None, bytes]] = set()
"""Runs that have lost ranks."""


@final
class StagePeers:
    """This rank's connections to the others; made by :meth:`join`.

    Args:
        placement: this process's rank and addresses.
        channel: control channel to the coordinator, for the rendezvous and failures.
        group: the process group.
        name: the pipeline's name in the coordinator's store.
        members: the run's numbers of the pipeline's ranks; () if they are equal.

    Attributes:
        transport: transport of the messages in steps.
    """

    def __init__(
        self,
        placement: Placement,
        channel: ControlChannel,
        group: Group,
        name: str,
        members: Sequence[int] = (),
    ) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.waits = Waits(channel, placement.rank, name)
        self.transport = PointToPoint(
            *(group.native, self.rank, self.world_size, self.waits.until)
        )
        self._members = tuple(members) or tuple(range(self.world_size))
        self._placement = placement
        self._channel = channel
        self._group = group
        self._name = name
        self._closed = False
        self._subgroups: list[Group] = []
        self._devices: DeviceGroup | None = None

    @staticmethod
    def join(placement: Placement, timeout_s: float) -> StagePeers:
        """Connects to all ranks of the run.

        Raises:
            CommunicationError: the ranks did not connect in time.
            ConfigError: ranks were lost in an earlier pipeline.
        """
        if (placement.coordinator, placement.key) in _reduced:
            raise ConfigError(
                "ranks died in an earlier Pipeline, and another one in the same "
                "processes needs all of them; save a checkpoint and start a new run"
            )
        placement, channel = connect(placement, timeout_s)
        assert placement.coordinator is not None
        number = _joined[placement.coordinator, placement.key] + 1
        _joined[placement.coordinator, placement.key] = number
        name, members = f"pipeline/{number}", range(placement.world_size)
        try:
            if number > 1:  # this rank left the run with its earlier pipeline
                channel.send(ReplicasFormed(rank=placement.rank, replicas=()))
            return StagePeers._form(placement, channel, name, members, timeout_s)
        except BaseException:
            channel.close()
            raise

    @staticmethod
    def _form(
        placement: Placement,
        channel: ControlChannel,
        name: str,
        members: Sequence[int],
        timeout_s: float,
    ) -> StagePeers:
        waits, ranks = Waits(channel, placement.rank, name), range(len(members))
        group = _group(waits, placement, ranks, name, timeout_s)
        peers = StagePeers(placement, channel, group, name, members)
        # gloo aborts the interpreter's exit if a group is left open.
        atexit.register(peers.close)
        try:  # shared memory to ranks on this host, gloo to the others
            memory = open_message_memory(
                *(placement.rank, placement.world_size),
                lambda text: gather_texts(group, text, "sharing memory"),
            )
            peers.transport.connect(memory)
        except BaseException:
            peers.disconnect()
            raise
        return peers

    def announce(self, replicas: Sequence[Sequence[int]]) -> None:
        """Reports that each of these replicas can continue without the others."""
        ranks = (tuple(self._members[rank] for rank in one) for one in replicas)
        member = self._members[self.rank]
        self._channel.send(ReplicasFormed(rank=member, replicas=tuple(ranks)))

    def awaits_loss(self) -> bool:
        """Waits a moment for the coordinator's message that a replica is lost.

        Raises:
            RemoteRankError: the run has ended.
        """
        try:
            self.waits.await_reason()
        except RankLostError:
            return True
        return False

    def rejoin(self, timeout_s: float) -> tuple[StagePeers, tuple[int, ...]]:
        """Connects to the surviving ranks; also returns their former numbers."""
        self.disconnect()
        _reduced.add((self._placement.coordinator, self._placement.key))
        regroups = self._channel.take(Regroup)
        lost = {rank for one in regroups for rank in one.left}
        kept = [r for r, member in enumerate(self._members) if member not in lost]
        level = logging.INFO if kept.index(self.rank) else logging.WARNING
        logger.log(
            level,
            "ranks %s are gone; %d ranks continue, and repeat the step",
            *(sorted(lost), len(kept)),
        )
        members = [self._members[rank] for rank in kept]
        place = replace(
            self._placement, rank=kept.index(self.rank), world_size=len(kept)
        )
        name = f"{self._name}/{regroups[-1].generation}"
        made = StagePeers._form(place, self._channel, name, members, timeout_s)
        return made, tuple(kept)

    @staticmethod
    def decline(placement: Placement, error: BaseException) -> None:
        """Connects only to abort a run in which this rank cannot participate."""
        with contextlib.suppress(CommunicationError, ConfigError, RemoteRankError):
            StagePeers.join(placement, _DECLINE_S).fail(error)

    def exchange(self, value: Any, timeout_s: float, what: str) -> list[Any]:
        """Sends a value by msgpack to all ranks; returns all values in rank order.

        Raises:
            DeadlineError: a rank was late.
            CommunicationError: a rank has disconnected.
            RemoteRankError: the run has ended.
        """
        if self.rank != 0:
            self.send(0, Message(structure=value), timeout_s, what)
            found: list[Any] = self.receive(0, timeout_s, what).structure
            return found
        others = range(1, self.world_size)
        values = [value]
        for rank in others:
            values.append(self.receive(rank, timeout_s, what).structure)
        for rank in others:
            self.send(rank, Message(structure=values), timeout_s, what)
        # Flush: this rank may leave next, and must have sent everything.
        self.transport.flush(timeout_s)
        return values

    def gather(self, part: Message, to: int, timeout_s: float) -> list[Message]:
        """Gathers all messages on rank `to` in rank order; returns [] elsewhere."""
        what = "a rank's part of the model's state"
        if self.rank != to:
            self.send(to, part, timeout_s, what)
            self.transport.flush(timeout_s)
            return []
        return [
            part if rank == to else self.receive(rank, timeout_s, what)
            for rank in range(self.world_size)
        ]

    def send(self, rank: int, message: Message, timeout_s: float, what: str) -> None:
        """Sends a message between steps to a rank that calls :meth:`receive`."""
        self.transport.send(Address(rank, BETWEEN_STEPS, what), message, timeout_s)

    def receive(self, rank: int, timeout_s: float, what: str) -> Message:
        """Receives a rank's next message sent with :meth:`send`."""
        address = Address(rank, BETWEEN_STEPS, what)
        return self.transport.receive(address, timeout_s)

    def heeds_signals(self, heeds: bool) -> None:
        """Reports to the launcher whether this rank stops by itself after a signal."""
        key = heeds_key(self._members[self.rank])
        self._channel.store_set(key, b"1" if heeds else b"")

    def report_saved(self, text: str) -> None:
        """Reports a complete checkpoint to the coordinator."""
        self._channel.send(CheckpointSaved(rank=self._members[self.rank], text=text))

    def form_groups(
        self, wanted: Sequence[tuple[int, ...]], shares: bool, timeout_s: float
    ) -> dict[tuple[int, ...], Group]:
        """Forms process groups of subsets of the ranks, for collectives; call it once.

        All ranks pass the same subsets, each ascending. `shares` is True if this rank
        may share memory with others on its host.

        Returns:
            The groups with this rank, by their ranks. They close with the pipeline.
        """
        groups = {}
        # In the same order on all ranks: forming waits for all ranks of a group.
        for ranks in sorted(set(wanted)):
            if self.rank not in ranks:
                continue
            name = f"{self._name}/{','.join(map(str, ranks))}"
            made = _group(self.waits, self._placement, ranks, name, timeout_s)
            self._subgroups.append(made)
            made.shares_host = agree_to_share(made, shares)
            groups[ranks] = made
        return groups

    def open_devices(
        self,
        device: torch.device,
        partners: frozenset[int],
        timeout_s: float,
    ) -> None:
        """Sends step tensors from device to device if all ranks support it.

        Call it on every rank, with the ranks that share a pipeline edge with it.

        Raises:
            CommunicationError: the ranks did not connect.
            RemoteRankError: the run has ended.
        """
        self._devices = open_device_group(
            self._group,
            device,
            DeviceGroupConfig(
                timeout_s,
                form=partial(form_group, device),
                attempt=trial(partners),
            ),
        )
        if self._devices is not None:
            made, stream = self._devices.made, SideStream(device)
            messages = DeviceMessages(made, self.rank, partners, device, stream)
            self.transport.connect(self.transport.memory, messages)

    def wait(
        self,
        poll: Callable[[], bool],
        end: Callable[[], object],
        ranks: Sequence[int],
        what: str,
        timeout_s: float,
    ) -> None:
        """Waits for a collective of some ranks; raises as `Waits.until` does.

        `end` is called on completion; it raises RuntimeError if the collective failed.
        """

        def look() -> bool:
            until_s = time.monotonic() + LOOK_EVERY_S
            while not poll():
                if time.monotonic() > until_s:
                    return False
                time.sleep(SLEEP_S)
            try:
                end()
            except CommunicationError as error:  # the reason may still arrive
                raise RuntimeError(error) from error
            return True

        others = [rank for rank in ranks if rank != self.rank]
        self.waits.until(look, others, what, timeout_s)

    def fail(self, error: BaseException) -> None:
        """Ends the run for all ranks, with this rank's error as the reason."""
        if not self._closed and not isinstance(error, RemoteRankError):
            failed = Failed(
                rank=self._members[self.rank],
                error=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
            )
            with contextlib.suppress(CommunicationError):
                self._channel.send(failed)
        self._end()

    def close(self) -> None:
        """Closes the connections. Call it on every rank; may be called twice."""
        if not self._closed:
            with contextlib.suppress(CommunicationError, RemoteRankError):
                self.transport.flush(_LEAVE_S)
                self._channel.send(Left(rank=self._members[self.rank]))
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self.disconnect()
            self._channel.close()

    def disconnect(self) -> None:
        """Closes the connections to other ranks, even if these have ended."""
        self._closed = True
        atexit.unregister(self.close)
        for group in self._subgroups:  # first, to release ranks that wait in them
            end_waits(group.native, group.rank, group.world_size)
        self.transport.close()
        for group in (*self._subgroups, self._group):
            group.close()
        if self._devices is not None:
            self._devices.close()  # last: the others have been notified


def _group(
    waits: Waits,
    placement: Placement,
    ranks: Sequence[int],
    name: str,
    timeout_s: float,
) -> Group:
    """Forms a process group of some ranks; its waits raise when the run ends."""
    place, deadline_s = ranks.index(placement.rank), timeout_s + BEYOND_S
    group = Group.form(waits, place, len(ranks), name, placement.listen, deadline_s)
    group.check = waits.check
    return group
