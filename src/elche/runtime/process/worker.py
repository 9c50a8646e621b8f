"""Worker shell: execution of the coordinator's instructions, without decisions.

One per rank, in the training thread. Everything happens where the loop asks for the
next batch; messages are sent one way and read without waiting, except in the named
waits.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from elche.comm.control.control_channel import ControlChannel, heeds_key
from elche.comm.transport.device_group import DeviceGroupConfig, open_device_group
from elche.comm.transport.exchange import agree_to_share, can_share
from elche.comm.transport.host_exchange import HostLeaders
from elche.comm.transport.process_group import (
    Group,
    break_left_groups,
    end_left_groups,
    late_error,
)
from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import (
    Abort,
    GrantBatches,
    GrantSteps,
    Instruction,
    MetricsReported,
    PolicyChosen,
    RankLeft,
    Regroup,
    Welcome,
)
from elche.errors import (
    CommunicationError,
    ConfigError,
    DeadlineError,
    ElcheError,
    MismatchError,
    NonFiniteError,
    ProtocolError,
    RankLostError,
    RemoteRankError,
)
from elche.runtime.process.environment import Placement
from elche.runtime.process.forming import form_watched
from elche.runtime.process.heartbeat import Heartbeat
from elche.runtime.report.timeline import Timeline

logger = logging.getLogger(__name__)

ABORT_WAIT_S = 5.0
LEFT_GROUPS_S = 5.0
ROLL_CALL_S = 2.0
HOST_AHEAD_BATCHES = 2
VERDICT_S = 5.0
"""Margin within which the coordinator names the late rank before a rank's deadline."""

Wanted = TypeVar("Wanted")


class Worker:
    """This rank's connection to the run.

    Args:
        placement: this process's place in the run.
        channel: the control channel.
        timeout_s: deadline of every wait.

    Attributes:
        is_cold: the batch in hand is not timed.
        max_samples: what the device turned out to hold at once; 0: no limit was met.
        on_rank_left: called while this rank waits inside a step, perhaps again and
            again, where another has left the epoch.
        meets_in_forward: ranks meet in forward passes, so none can leave alone.
        name_samples: adds to an error what its batches are, in the epoch under way.
        can_share: this rank may share memory with others of its host.
        on_regroup: called between epochs, where ranks have died, or are to join.
        is_new: this rank is to join a run under way, and holds nothing of it yet.
        timeline: what this rank did.
        members: ranks of the run that live, in order.
        dead: those of it that have died, and not left in order.
    """

    def __init__(
        self, placement: Placement, channel: ControlChannel, timeout_s: float
    ) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.timeout_s = timeout_s + VERDICT_S
        self.is_cold = True
        self.meets_in_forward = False
        self.max_samples = 0
        self.on_notification: Callable[[MetricsReported | PolicyChosen], None] = _ignore
        self.on_rank_left: Callable[[RankLeft], None] | None = None
        self.name_samples: Callable[[NonFiniteError], NonFiniteError] = _as_it_is
        self.on_regroup: Callable[[], None] | None = None
        self.timeline = Timeline(self.rank)
        self.members: list[int] = [*range(placement.world_size)]
        self.dead: set[int] = set()
        self.is_new = placement.joins
        if self.is_new:
            self.members.append(self.rank)  # of the others it hears when it joins
        self._heartbeat: Heartbeat | None = None
        self._channel = channel
        self._group: Group | None = None
        self._side_groups: list[Group] = []
        self._others: Group | None = None
        self._generation = 0
        self._device_config = DeviceGroupConfig(self.timeout_s)
        self._shares = self.can_share = self._is_due = False
        self._aborted: ElcheError | None = None
        self._events: deque[torch.cuda.Event] = deque()

    @property
    def group(self) -> Group:
        """The process group of this generation."""
        if self._group is None:
            raise CommunicationError("the run has ended on this rank")
        return self._group

    @property
    def is_closed(self) -> bool:
        """Whether this rank has no part in the run any more."""
        return self._group is None or self._aborted is not None

    @property
    def place(self) -> int:
        """This rank's place among those that live."""
        return self.members.index(self.rank)

    def begin_beats(self) -> None:
        """Begins to say that this process lives."""
        self._heartbeat = Heartbeat(self._channel)

    def form_group(self, welcome: Welcome, transport: str) -> None:
        """Forms the generation's process group."""
        self._generation = welcome.generation
        self._note_transport(transport)
        self._group = group = self._formed(welcome.generation)
        self.let_share(agree_to_share(group, self.can_share))
        on_cpu = any(name.startswith("CPU") for name in welcome.devices)
        if group.world_size == 1:
            return
        if transport != "gloo" and not on_cpu:
            device = self.placement.device
            group.devices = open_device_group(group, device, self._device_config)
        if transport == "nccl" and group.devices is None:
            raise ConfigError(
                "transport.kind='nccl' needs NCCL and a CUDA device of its own on "
                f"every rank, got {', '.join(welcome.devices)}; leave kind= out"
            )

    def stay_apart(self, transport: str) -> None:
        """Forms no group yet: the others go on until this rank has built its own."""
        self._note_transport(transport)
        self._group = Group.alone(self.timeout_s)

    def _note_transport(self, transport: str) -> None:
        """What groups are formed with; who shares memory is agreed on in each anew."""
        own = self.placement.device_name
        self.can_share = transport != "gloo" and can_share(own)
        listen = self.placement.listen if transport == "nccl" else ""
        self._device_config = DeviceGroupConfig(self.timeout_s, listen)

    @property
    def generation(self) -> int:
        """The number of the group, or of the one to be formed next."""
        return self._generation

    @property
    def is_due(self) -> bool:
        """Whether ranks have died, and the group of the others is to be formed."""
        return self._is_due

    def hear_of(self, *regroups: Regroup) -> None:
        """Ranks have died, or join: the next group is of those that are there then.

        Args:
            regroups: the words of it, to which those in line are added.
        """
        for each in (*regroups, *self._channel.take(Regroup)):
            self._is_due, self._generation = True, each.generation
            if not each.in_order:
                self.dead.update(each.left)
            stay = () if self.rank in each.joined else self.members
            self.members = sorted({*stay, *each.joined} - set(each.left))

    def regroup(self) -> None:
        """Forms the group of the members, and leaves the last one to itself.

        Raises:
            RankLostError: another one has died; another word of it is in line.
        """
        for group in (*self._side_groups, self._others, self._group):
            if group is not None:
                group.leave()
        self._side_groups.clear()
        self._others = None
        self._group = Group.alone(self.timeout_s)  # what is asked meanwhile
        self._group = self._formed(self._generation)
        self._is_due = False
        end_left_groups(0.0)

    def let_share(self, shares: bool) -> None:
        """The group's ranks have agreed whether they share memory with their hosts'.

        Args:
            shares: all of them may.
        """
        self._shares = shares
        self._share(self.group, self._generation)

    def _share(self, group: Group, name: int | str) -> None:
        group.shares_host = self._shares
        if self._shares:
            form = partial(self._formed, f"{name}/leaders")
            group.host_leaders = HostLeaders(group, form)

    def side_group(self) -> Group:
        """Forms another group of the same ranks, with all of them.

        Its collectives are ordered for themselves: what runs in it may wait inside a
        backward pass beside the gradients' own reductions.
        """
        name = f"{self._generation}/side/{len(self._side_groups)}"
        group = self._formed(name)
        group.shares_host = self.group.shares_host
        self._side_groups.append(group)
        return group

    def group_without(self, left_out: Sequence[int], number: int) -> Group | None:
        """The group of all but some ranks; None: this rank is not of them.

        The one formed last is kept, until it is another one.

        Args:
            left_out: of the run.
            number: of such groups of the run so far.
        """
        if not left_out:
            return self.group
        ranks = [rank for rank in self.members if rank not in left_out]
        if self._others is not None and self._others.ranks != ranks:
            self._others.close()  # as all others of it do, also where left out now
            self._others = None
            end_left_groups(0.0)  # of its hosts' leaders
        if self.rank in left_out:
            return None
        if self._others is not None:
            return self._others
        if len(ranks) == 1:
            return Group.alone(self.timeout_s)
        name = f"{self._generation}/without/{number}"
        self._others = group = self._formed(name, ranks)
        self._share(group, name)
        if self.group.devices is not None:
            device = self.placement.device
            group.devices = open_device_group(group, device, self._device_config)
        return group

    def _formed(self, name: int | str, ranks: Sequence[int] | None = None) -> Group:
        """Forms a group of all ranks, or of some."""
        ranks = self.members if ranks is None else ranks
        if len(ranks) == 1:
            return Group.alone(self.timeout_s)
        try:
            group = form_watched(
                self._channel,
                ranks.index(self.rank),
                len(ranks),
                name,
                self.placement.listen,
                self.timeout_s,
                self._check,
            )
        except CommunicationError:
            # The reason: the run was ended, or a rank has died meanwhile.
            self._channel.await_kinds((Abort, Regroup), ABORT_WAIT_S)
            self._check()
            raise
        group.ranks = ranks
        group.on_failure = partial(self._why_failed, ranks)
        group.check = self._check
        return group

    def send(self, *events: Event) -> None:
        """Sends events to the coordinator, at once; does not wait.

        What sending costs is the system call, not what is sent.
        """
        self._channel.send(*events)

    def take_all(self, handle: Callable[[Instruction], None]) -> None:
        """Handles every instruction that has come, without waiting.

        Raises:
            RemoteRankError: the run was ended; other kinds of `ElcheError` say why.
        """
        if self._heartbeat is not None:
            self._heartbeat.seen()
        for instruction in self._channel.ready():
            if not self._is_notification(instruction):
                handle(instruction)

    def receive(
        self,
        handle: Callable[[Instruction], None],
        waiting_for: str,
        most_s: float | None = None,
    ) -> None:
        """Waits for one instruction, ``most_s`` if that is sooner, and handles it."""
        timeout_s = self.timeout_s if most_s is None else min(most_s, self.timeout_s)
        instruction = self._receive(timeout_s, waiting_for)
        if not self._is_notification(instruction):
            handle(instruction)

    def _receive(self, timeout_s: float, waiting_for: str) -> Instruction:
        """Waits for an instruction, and is seen to wait."""
        if self._heartbeat is not None:
            self._heartbeat.waits()
        instruction = self._channel.receive(timeout_s, waiting_for)
        if self._heartbeat is not None:
            self._heartbeat.seen()
        return instruction

    def regroup_if_told(self) -> None:
        """Between epochs, before all ranks meet: forms the group of those who live.

        Where ranks have died since, or when the last epoch ended.
        """
        if self.on_regroup is not None:
            while self._is_due or self._left():
                self.on_regroup()

    def sleep_until_told(self, timeout_s: float) -> None:
        """Sleeps until an instruction comes, at most ``timeout_s``."""
        self._channel.wait_readable(timeout_s)

    def expect(self, kind: type[Wanted], waiting_for: str) -> Wanted:
        """Waits for an instruction of one kind.

        Grants of an epoch that the loop has left are passed over; nothing else may
        come first.
        """
        while True:
            instruction = self._receive(self.timeout_s, waiting_for)
            if isinstance(instruction, Regroup) and self.on_regroup is not None:
                self.hear_of(instruction)
                self.on_regroup()
                continue
            stale = isinstance(instruction, (GrantSteps, GrantBatches))
            if not self._is_notification(instruction) and not stale:
                break
        if not isinstance(instruction, kind):
            raise ProtocolError(
                f"rank {self.rank} waited for {waiting_for}, got {instruction!r}"
            )
        return instruction

    def heeds_signals(self, heeds: bool) -> None:
        """Tells the launcher whether this rank ends well by itself when signalled."""
        self._channel.store_set(heeds_key(self.rank), b"1" if heeds else b"")

    def pace_device(self) -> None:
        """Keeps the host at most two batches ahead of a CUDA device."""
        if self.placement.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > HOST_AHEAD_BATCHES:
            self._events.popleft().synchronize()

    def close(self, last_event: Event | None) -> None:
        """Sends the last event if there is one, and ends group and channel."""
        try:
            if self._heartbeat is not None:
                self._heartbeat.close()
            if last_event is not None and self._aborted is None:
                self._channel.send(last_event)
        except CommunicationError:
            pass
        finally:
            for group in (*self._side_groups, self._others, self._group):
                if group is not None:
                    group.close()
            self._side_groups.clear()
            self._group = self._others = self.on_regroup = None
            self._channel.close()
            break_left_groups()
            if not end_left_groups(LEFT_GROUPS_S):
                logger.warning("rank %d: collectives of dead ranks hang", self.rank)

    def _check(self) -> None:
        """Raises if the run was ended, or a rank lost, while this one waits."""
        if self._heartbeat is not None:
            self._heartbeat.waits()
        abort = self._channel.find_abort()
        if abort is not None:
            self._raise_if_abort(abort)
        if left := self._left():
            # Kept by no frame: that would keep the collective, and its connections.
            raise _lost_error(self.rank, left)
        if self.on_rank_left is not None:
            for each in self._channel.waiting(RankLeft):
                self.on_rank_left(each)

    def _is_notification(self, instruction: Instruction) -> bool:
        """Dispatches notifications; raises if the run was aborted."""
        self._raise_if_abort(instruction)
        if isinstance(instruction, (MetricsReported, PolicyChosen)):
            self.on_notification(instruction)
            return True
        return False

    def _raise_if_abort(self, instruction: Instruction) -> None:
        if isinstance(instruction, Abort):
            raise self._aborted_by(instruction)

    def _aborted_by(self, abort: Abort) -> ElcheError:
        """The error that ends this rank; raises SystemExit where all end by it."""
        error = _error_of(abort)
        if isinstance(error, NonFiniteError):
            error = self.name_samples(error)
        self._aborted = error
        if abort.exit_code is not None:
            logger.warning("%s; rank %d ends with it", abort.reason, self.rank)
            raise SystemExit(abort.exit_code)
        return error

    def _why_failed(
        self, ranks: Sequence[int], text: str, missing: Sequence[int]
    ) -> Exception:
        """A collective failed: the coordinator knows who is gone, in a moment.

        Args:
            ranks: of the collective.
            text: what failed.
            missing: who did not come to it, if that was seen.
        """
        with contextlib.suppress(CommunicationError):
            self._channel.await_kinds((Abort, Regroup), ABORT_WAIT_S)
            abort = self._channel.find_abort()
            if abort is not None:
                self._aborted_by(abort)
            elif left := self._left():
                return _lost_error(self.rank, left)
        if not isinstance(self._aborted, DeadlineError | None):
            return self._aborted
        said = text if self._aborted is None else f"{self._aborted}; {text}"
        missing = missing or self._missing(ranks)
        if not missing:
            return self._aborted or CommunicationError(text)
        return late_error(said, missing)

    def _left(self) -> list[int]:
        """Ranks that have died, as far as the group does not know it yet."""
        told = self._channel.waiting(Regroup)
        return [rank for each in told for rank in each.left]

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Ranks that do not report the same failure soon after this one.

        gloo names nobody. Ranks of a collective that fails fail together, and one that
        hangs, or is elsewhere in its loop, does not.
        """
        keys = {r: f"failed/{self._generation}/{r}" for r in ranks}
        try:
            self._channel.store_set(keys[self.rank], b"")
            come = self._channel.store_published([*keys.values()], ROLL_CALL_S)
        except CommunicationError:  # nobody can be asked
            return []
        if keys[self.rank] not in come:  # the coordinator does not answer
            return []
        return [rank for rank, key in keys.items() if key not in come]


def _lost_error(own: int, left: Sequence[int]) -> RankLostError:
    return RankLostError(
        f"rank {own}: {_named(left)} died where the others cannot take it up again (to "
        "save, to gather, to evaluate together); "
        "start the run anew from its last checkpoint (--max-restarts)"
    )


def _named(ranks: Sequence[int]) -> str:
    kind = "rank" if len(ranks) == 1 else "ranks"
    return f"{kind} {', '.join(map(str, ranks))}"


def _as_it_is(error: NonFiniteError) -> NonFiniteError:
    return error


def _ignore(notification: MetricsReported | PolicyChosen) -> None:
    """Notifications before the run has set its handler."""


def _error_of(abort: Abort) -> ElcheError:
    if abort.kind == "config":
        return ConfigError(abort.reason)
    if abort.kind == "mismatch":
        return MismatchError(abort.reason)
    if abort.kind == "non_finite":
        return NonFiniteError(
            abort.reason, abort.failed_rank, abort.batches, abort.part
        )
    if abort.kind == "protocol":
        return ProtocolError(abort.reason)
    if abort.kind == "deadline":
        return DeadlineError(abort.reason)
    return RemoteRankError(abort.reason, abort.failed_rank, abort.traceback)
