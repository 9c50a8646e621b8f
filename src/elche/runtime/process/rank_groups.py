"""Process groups of a rank; other ranks may die while one is formed.

gloo's connect cannot be cancelled: it waits even for ranks that died after publishing
an address. So a separate thread connects; it is abandoned at the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.comm.transport.device_group import DeviceGroupConfig, open_device_group
from elche.comm.transport.exchange import agree_to_share
from elche.comm.transport.host_exchange import HostLeaders
from elche.comm.transport.process_group import (
    Group,
    end_left_groups,
    keep_left_groups,
)
from elche.comm.transport.shared_memory import may_share_memory
from elche.coordination.protocol.instructions import Abort, Regroup, Welcome
from elche.devices.backends import form_group
from elche.errors import CommunicationError, ConfigError
from elche.runtime.process.environment import Placement

LOOK_S = 0.001
CHECK_S = 0.002
ABORT_WAIT_S = 5.0
LEFT_GROUPS_S = 5.0
_log = logging.getLogger(__name__)


@final
class RankGroups:
    """This rank's process groups: of all members of the run, and of subsets.

    Args:
        placement: this process's place in the run.
        channel: the control channel.
        timeout_s: deadline of forming a group, and of a collective.
        check: called during waits; reads the channel, and raises if the run is over or
            a rank is lost.
        why_failed: makes an error from a collective's ranks, text and missing ranks.

    Attributes:
        generation: number of the members' group, or of the one to be formed next.
        members: living ranks of the run, in order.
        can_share: this rank may share memory with others of its host.
    """

    def __init__(
        self,
        placement: Placement,
        channel: ControlChannel,
        timeout_s: float,
        check: Callable[[], None],
        why_failed: Callable[[Sequence[int], str, Sequence[int]], Exception],
    ) -> None:
        self._placement = placement
        self._rank = placement.rank
        self._channel = channel
        self._timeout_s = timeout_s
        self._check, self._why_failed = check, why_failed
        self.generation = 0
        self.members = [*range(placement.world_size)]
        if placement.joins:
            self.members.append(self._rank)  # the others' ranks follow when it joins
        self._shares = self.can_share = False
        self._listen = ""
        self.has_ended = True  # there is no group: not yet, or not any more
        self._current = Group.alone(timeout_s)
        self._side: list[Group] = []
        self._others: Group | None = None

    @property
    def current(self) -> Group:
        """The members' group."""
        if self.has_ended:
            raise CommunicationError("the run has ended on this rank")
        return self._current

    def form(self, welcome: Welcome, transport: str) -> None:
        """Forms the first group of the members.

        Raises:
            ConfigError: NCCL was requested, and cannot be used.
            CommunicationError: a member did not join in time.
        """
        self.generation = welcome.generation
        self._note_transport(transport)
        self._current = group = self._formed(welcome.generation)
        self.has_ended = False
        self.set_sharing(agree_to_share(group, self.can_share))
        if group.world_size == 1:
            return
        on_cpu = any(name.startswith("CPU") for name in welcome.devices)
        if transport != "gloo" and not on_cpu:
            self._open_devices(group)
        if transport == "nccl" and group.devices is None:
            raise ConfigError(
                "transport.kind='nccl' needs a device of its own on every rank, all of "
                "one type with a backend in torch (NCCL on CUDA), got "
                f"{', '.join(welcome.devices)}; leave kind= out"
            )

    def stay_apart(self, transport: str) -> None:
        """Forms no group yet: the others train until this rank is ready to join."""
        self._note_transport(transport)
        self.has_ended = False

    def _note_transport(self, transport: str) -> None:
        """Records the transport of groups; each group agrees on shared memory."""
        on_cpu = self._placement.device.type == "cpu"
        self.can_share = transport != "gloo" and on_cpu and may_share_memory()
        self._listen = self._placement.listen if transport == "nccl" else ""

    def _open_devices(self, group: Group) -> None:
        device = self._placement.device
        form = partial(form_group, device)
        config = DeviceGroupConfig(self._timeout_s, form, self._listen)
        group.devices = open_device_group(group, device, config)

    def note_regroup(self, regroup: Regroup) -> None:
        """Updates the members by a `Regroup`; :meth:`renew` forms their group."""
        self.generation = regroup.generation
        stay = () if self._rank in regroup.joined else self.members
        self.members = sorted({*stay, *regroup.joined} - set(regroup.left))

    def renew(self) -> None:
        """Forms the members' group, and abandons the last one.

        Raises:
            RankLostError: another rank has died.
        """
        for group in self._all():
            group.leave()
        self._current = Group.alone(self._timeout_s)  # for calls meanwhile
        self._current = self._formed(self.generation)
        end_left_groups(0.0)

    def set_sharing(self, shares: bool) -> None:
        """Sets whether members share memory with those of their host.

        Args:
            shares: all members may share memory.
        """
        self._shares = shares
        self._share(self.current, self.generation)

    def _share(self, group: Group, name: int | str) -> None:
        group.shares_host = self._shares
        if self._shares:
            form = partial(self._formed, f"{name}/leaders")
            group.host_leaders = HostLeaders(group, form)

    def side(self) -> Group:
        """Forms another group of the members, with all of them.

        Its collectives are ordered separately, so they may wait inside a backward pass
        beside the gradients' own reductions.
        """
        group = self._formed(f"{self.generation}/side/{len(self._side)}")
        group.shares_host = self.current.shares_host
        self._side.append(group)
        return group

    def without(self, excluded: Sequence[int], number: int) -> Group | None:
        """Forms the group of all but some ranks; None if this rank is excluded.

        The last such group is reused while its ranks stay the same.

        Args:
            excluded: excluded ranks of the run.
            number: number of such groups of the run so far.
        """
        if not excluded:
            return self.current
        ranks = [rank for rank in self.members if rank not in excluded]
        if self._others is not None and self._others.ranks != ranks:
            self._others.close()  # all its ranks do so, excluded ones too
            self._others = None
            end_left_groups(0.0)  # of its hosts' leaders
        if self._rank in excluded:
            return None
        if self._others is not None:
            return self._others
        if len(ranks) == 1:
            return Group.alone(self._timeout_s)
        name = f"{self.generation}/without/{number}"
        self._others = group = self._formed(name, ranks)
        self._share(group, name)
        if self.current.devices is not None:
            self._open_devices(group)
        return group

    def _formed(self, name: int | str, ranks: Sequence[int] | None = None) -> Group:
        ranks = self.members if ranks is None else ranks
        if len(ranks) == 1:
            return Group.alone(self._timeout_s)
        try:
            group = self._form_watched(ranks, name)
        except CommunicationError:
            # The reason: the run was ended, or a rank has died meanwhile.
            self._channel.await_kinds((Abort, Regroup), ABORT_WAIT_S)
            self._check()
            raise
        group.ranks = ranks
        group.on_failure = partial(self._why_failed, ranks)
        group.check = self._check
        return group

    def _form_watched(self, ranks: Sequence[int], name: int | str) -> Group:
        """Forms a group as `Group.form` does, but ``check`` may end it."""
        meeting = _Rendezvous(self._channel)
        made: list[Group] = []
        errors: list[BaseException] = []
        place = ranks.index(self._rank), len(ranks), name, self._placement.listen

        def form() -> None:
            try:
                made.append(Group.form(meeting, *place, self._timeout_s))
            except BaseException as error:
                errors.append(error)
            if meeting.is_over and made:
                made.pop().leave()

        thread = threading.Thread(target=form, name="elche-forming", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                self._channel.wait_for_values(CHECK_S)
                self._check()
        except BaseException:
            meeting.is_over = True
            raise
        if errors:
            raise errors[0]
        return made[0]

    def close(self) -> None:
        """Closes all groups; without a coordinator they are abandoned."""
        for group in self._all():
            if self._channel.is_unreachable:
                group.leave()
            else:
                group.close()
        self.has_ended = True

    def _all(self) -> list[Group]:
        """Returns all groups, and keeps only the members' group here."""
        groups = [*self._side, *filter(None, [self._others]), self._current]
        self._side.clear()
        self._others = None
        return groups

    def end_left(self) -> None:
        """Ends abandoned groups, after the channel is closed."""
        if not end_left_groups(LEFT_GROUPS_S):
            _log.warning("rank %d: collectives of dead ranks hang", self._rank)
            keep_left_groups()


@final
class _Rendezvous:
    """Store of the channel for a thread that may send on it, but not read."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self.is_over = False  # written by the training thread

    def store_set(self, key: str, value: bytes) -> None:
        """See `RendezvousChannel`."""
        self._channel.store_set(key, value)

    def store_get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value that the training thread reads."""
        self._channel.store_ask(key)
        deadline_s = time.monotonic() + timeout_s
        while (value := self._channel.stored(key)) is None:
            if self.is_over or time.monotonic() > deadline_s:
                raise CommunicationError(f"no rank published {key!r} in time")
            time.sleep(LOOK_S)
        return value
