"""Worker shell: execution of the coordinator's instructions, without decisions.

One per rank, in the training thread. Everything happens where the loop asks for the
next batch; messages are sent one way and read without waiting, except in the named
waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from torch import distributed as dist

from elche.comm.control.control_channel import ControlChannel, heeds_key
from elche.comm.transport.process_group import Group, late_error
from elche.coordination.protocol.events import DefaultGroupFormed, Event
from elche.coordination.protocol.instructions import (
    Abort,
    GrantBatches,
    Instruction,
    MetricsReported,
    PolicyChosen,
    RankLeft,
    Regroup,
)
from elche.devices import streams
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
    named_ranks,
)
from elche.runtime.process.environment import Placement
from elche.runtime.process.heartbeat import Heartbeat
from elche.runtime.process.rank_groups import ABORT_WAIT_S, RankGroups
from elche.runtime.report.timeline import Timeline

logger = logging.getLogger(__name__)

ROLL_CALL_S = 2.0
HOST_AHEAD_BATCHES = 2
VERDICT_S = 5.0
"""Margin (s) in which the coordinator names a late rank before a rank's deadline."""

Wanted = TypeVar("Wanted")


class Worker:
    """This rank's connection to the run.

    Args:
        placement: this process's place in the run.
        channel: the control channel.
        timeout_s: deadline of every wait.

    Attributes:
        is_cold: the current batch is not timed.
        max_samples: most samples that the device holds at once; 0: no limit found.
        on_wait: called repeatedly while this rank waits for others, with the ranks that
            have left the epoch.
        meets_in_forward: forward passes have collectives; no rank can leave alone.
        name_samples: adds the samples of its batches to an error of this epoch.
        survives: the run continues without ranks that are lost.
        on_regroup: called between epochs if ranks have died or are to join.
        is_new: this rank joins a running run, and has no state of it yet.
        timeline: timeline of this rank.
        groups: its process groups.
        dead: ranks that have died, without those that left cleanly.
        is_due: the next group is to be formed, after deaths or joins.
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
        self.on_notification: Callable[[MetricsReported | PolicyChosen], None]
        self.on_notification = lambda notification: None
        self.on_wait: Callable[[Iterable[RankLeft]], None] | None = None
        self.name_samples: Callable[[NonFiniteError], NonFiniteError] = lambda e: e
        self.survives = False
        self.on_regroup: Callable[[], None] | None = None
        self.timeline = Timeline(self.rank)
        self.dead: set[int] = set()
        self.is_new = placement.joins
        self._heartbeat: Heartbeat | None = None
        self._channel = channel
        self.groups = RankGroups(
            placement, channel, self.timeout_s, self._check, self._why_failed
        )
        self.is_due, self._has_default_group = False, not dist.is_available()
        self._aborted: ElcheError | None = None
        self._events: deque[Any] = deque()

    @property
    def group(self) -> Group:
        """The members' process group."""
        return self.groups.current

    @property
    def members(self) -> list[int]:
        """Living ranks of the run, in order."""
        return self.groups.members

    @property
    def is_closed(self) -> bool:
        """True if this rank has left the run."""
        return self.groups.has_ended or self._aborted is not None

    @property
    def place(self) -> int:
        """This rank's place among the living ranks."""
        return self.members.index(self.rank)

    def begin_beats(self) -> None:
        """Starts the heartbeat thread."""
        self._heartbeat = Heartbeat(self._channel)

    def note_regroup(self, *regroups: Regroup) -> None:
        """Records deaths and joins, for the next group.

        Args:
            regroups: received `Regroup` instructions; queued ones are added.
        """
        for each in (*regroups, *self._channel.take(Regroup)):
            self.is_due = True
            if not each.in_order:
                self.dead.update(each.left)
            self.groups.note_regroup(each)

    def regroup(self) -> None:
        """Forms the members' group, and abandons the last one.

        Raises:
            RankLostError: another rank has died; its `Regroup` is queued.
        """
        self.groups.renew()
        self.is_due = False

    def send(self, *events: Event) -> None:
        """Sends events to the coordinator, at once; does not wait.

        The cost is that of the system call, whatever is sent.
        """
        if not self._has_default_group and dist.is_initialized():
            self._has_default_group = True
            events = DefaultGroupFormed(rank=self.rank), *events
            if self.placement.resumes and self.rank == self.members[0]:
                logger.warning(
                    "torch.distributed's default process group exists: the death of "
                    "any rank ends this run"
                )
        self._channel.send(*events)

    def take_all(self, handle: Callable[[Instruction], None]) -> None:
        """Handles every received instruction, without waiting.

        Raises:
            RemoteRankError: the run was ended; or another `ElcheError`, by its cause.
        """
        if self._heartbeat is not None:
            self._heartbeat.seen()
        for instruction in self._channel.ready():
            if not self._is_notification(instruction):
                handle(instruction)

    def receive(self, handle: Callable[[Instruction], None], waiting_for: str) -> None:
        """Waits for one instruction, and handles it."""
        instruction = self._receive(waiting_for)
        if not self._is_notification(instruction):
            handle(instruction)

    def _receive(self, waiting_for: str) -> Instruction:
        if self._heartbeat is not None:
            self._heartbeat.waits()
        instruction = self._channel.receive(self.timeout_s, waiting_for)
        if self._heartbeat is not None:
            self._heartbeat.seen()
        return instruction

    def regroup_if_due(self) -> None:
        """Forms the survivors' group between epochs, before a collective of all ranks.

        Does nothing unless ranks have died or are to join.
        """
        if self.on_regroup is not None:
            while self.is_due or self._left():
                self.on_regroup()

    def sleep_until_message(self, timeout_s: float) -> None:
        """Sleeps until an instruction comes, at most ``timeout_s``."""
        self._channel.wait_readable(timeout_s)

    def expect(self, kind: type[Wanted], waiting_for: str) -> Wanted:
        """Waits for an instruction of one kind.

        Skips grants of an epoch that the loop has left; any other instruction is an
        error.
        """
        while True:
            instruction = self._receive(waiting_for)
            if isinstance(instruction, Regroup) and self.on_regroup is not None:
                self.note_regroup(instruction)
                self.on_regroup()
                continue
            stale = isinstance(instruction, GrantBatches)
            if not self._is_notification(instruction) and not stale:
                break
        if not isinstance(instruction, kind):
            raise ProtocolError(
                f"rank {self.rank} waited for {waiting_for}, got {instruction!r}"
            )
        return instruction

    def heeds_signals(self, heeds: bool) -> None:
        """Notifies the launcher whether this rank ends cleanly after a signal."""
        self._channel.store_set(heeds_key(self.rank), b"1" if heeds else b"")

    def pace_device(self, ahead: int = HOST_AHEAD_BATCHES) -> float:
        """Keeps the host at most ``ahead`` batches ahead; returns its wait in s."""
        started_s, device = time.monotonic(), self.placement.device
        if device.type != "cpu":
            self._events.append(streams.record_event(device))
        while len(self._events) > ahead:
            self._events.popleft().synchronize()
        return time.monotonic() - started_s

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
            self.groups.close()
            self.on_regroup = None
            self._channel.close()
            self.groups.end_left()

    def _check(self) -> None:
        """Raises if the run was ended, or a rank lost, during a wait."""
        if self._heartbeat is not None:
            self._heartbeat.waits()
        abort = self._channel.find_abort()
        if abort is not None:
            raise self._aborted_by(abort)
        if left := self._left():
            # Kept by no frame: that would keep the collective, and its connections.
            raise _lost_error(self.rank, left)
        if self.on_wait is not None:
            self.on_wait(self._channel.waiting(RankLeft))

    def _is_notification(self, instruction: Instruction) -> bool:
        """Dispatches notifications; raises if the run was aborted."""
        if isinstance(instruction, Abort):
            raise self._aborted_by(instruction)
        if isinstance(instruction, (MetricsReported, PolicyChosen)):
            self.on_notification(instruction)
            return True
        return False

    def _aborted_by(self, abort: Abort) -> ElcheError:
        """The error that ends this rank; raises SystemExit if all ranks exit."""
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
        """The error of a failed collective; the coordinator soon reports lost ranks."""
        with contextlib.suppress(CommunicationError):
            self._channel.await_kinds((Abort, Regroup), ABORT_WAIT_S)
            abort = self._channel.find_abort()
            if abort is not None:
                self._aborted_by(abort)
            elif left := self._left():
                return _lost_error(self.rank, left)
        if not isinstance(self._aborted, DeadlineError | None):
            return self._aborted
        message = text if self._aborted is None else f"{self._aborted}; {text}"
        missing = missing or self._missing(ranks)
        if not missing:
            return self._aborted or CommunicationError(text)
        return late_error(message, missing)

    def _left(self) -> list[int]:
        """Ranks that have left the run, by queued `Regroup` instructions."""
        return [rank for r in self._channel.waiting(Regroup) for rank in r.left]

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Ranks that do not report the same failure soon after this rank."""
        keys = {r: f"failed/{self.groups.generation}/{r}" for r in ranks}
        try:
            self._channel.store_set(keys[self.rank], b"")
            come = self._channel.store_published([*keys.values()], ROLL_CALL_S)
        except CommunicationError:  # no coordinator to ask
            return []
        if keys[self.rank] not in come:  # the coordinator does not answer
            return []
        return [rank for rank, key in keys.items() if key not in come]


def _lost_error(own: int, left: Sequence[int]) -> RankLostError:
    return RankLostError(
        f"rank {own}: {named_ranks(left)} died where the others cannot recover (in "
        "elche.all_gather inside an epoch, or while copies of the model are "
        "averaged); restart the run from its last checkpoint (--max-restarts)"
    )


_ERRORS: Final[dict[str, Callable[[str], ElcheError]]] = {
    "config": ConfigError,
    "mismatch": MismatchError,
    "protocol": ProtocolError,
    "deadline": DeadlineError,
}
"""Errors by the kind of an `Abort`."""


def _error_of(abort: Abort) -> ElcheError:
    if abort.kind == "non_finite":
        return NonFiniteError(
            abort.reason, abort.failed_rank, abort.batches, abort.part
        )
    if abort.kind in _ERRORS:
        return _ERRORS[abort.kind](abort.reason)
    return RemoteRankError(abort.reason, abort.failed_rank, abort.traceback)
