"""Ends of a run: deadline and abort. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from elche.coordination.epochs import Epochs
from elche.coordination.gathering import Barriers
from elche.coordination.membership import Membership
from elche.coordination.protocol.events import (
    BarrierReached,
    EpochOpened,
    Event,
    Failed,
    Join,
    Left,
    RankLost,
)
from elche.coordination.protocol.instructions import Abort, Instruction
from elche.errors import (
    ConfigError,
    ElcheError,
    MismatchError,
    NonFiniteError,
    TransitionError,
)

PAUSED_S = 5.0
"""Longest time (s) between ticks; beyond it the coordinator itself was paused."""
JOINING_S = 300.0
"""Deadline (s) for ranks to join, until their configuration sets its own."""


@final
class Deadline:
    """Deadline of ranks that others wait for: the last message and the timeout.

    Attributes:
        timeout_s: longest wait for ranks.
        last_message_s: time of the last message.
    """

    def __init__(self, membership: Membership, barriers: Barriers) -> None:
        self._membership = membership
        self._barriers = barriers
        self.timeout_s = JOINING_S
        self.last_message_s: float | None = None
        self._ticked_s: float | None = None

    def since_s(self, epochs: Epochs | None) -> float | None:
        """Returns the last message's time if ranks wait for others, else None.

        Between epochs ranks may be idle.
        """
        is_waiting = self._membership.is_joining or bool(self._barriers)
        if epochs is not None:
            is_waiting |= epochs.is_under_way or epochs.is_opening
            is_waiting |= bool(epochs.ending.held)
        return self.last_message_s if is_waiting else None

    def exceeded(self, epochs: Epochs | None, now_s: float) -> str:
        """Checks the deadline at a tick; returns the overdue wait as text, or ""."""
        since_s = self.since_s(epochs)
        ticked_s, self._ticked_s = self._ticked_s, now_s
        was_paused = ticked_s is not None and now_s - ticked_s > PAUSED_S
        if since_s is None or was_paused:
            self.last_message_s = since_s = now_s
        if now_s - since_s < self.timeout_s:
            return ""
        return (
            f"no message arrived for {self.timeout_s:g} s while the run was "
            f"{self.doing(epochs)}; raise timeout_s if a batch really takes so long"
        )

    def doing(self, epochs: Epochs | None) -> str:
        """Describes the run's current activity."""
        if epochs is None and not self._membership.is_joining:
            return "in a Pipeline, or before elche.setup"
        if epochs is None:
            return f"waiting for ranks {self._membership.missing} to join"
        if epochs.is_opening and not epochs.is_under_way:
            return f"waiting for {epochs.waiting_to_open()}"
        if self._barriers:
            return f"waiting for {self._barriers.waiting_for(self._membership.ranks)}"
        if epochs.is_under_way:
            return f"waiting for {epochs.policy.waiting_for()}"
        return "between epochs"


@final
class RunEnd:
    """Abort of a run, which is sent to every rank."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sent: Abort | None = None

    @property
    def reason(self) -> str | None:
        """Reason of the run's end; None before it."""
        return None if self._sent is None else self._sent.reason

    def abort(
        self, reason: str, rank: int | None = None, kind: str = "remote"
    ) -> list[Instruction]:
        """Ends the run; ``rank`` is the rank that caused it, if one did."""
        return self._send(Abort(rank=-1, reason=reason, failed_rank=rank, kind=kind))

    def fail(self, event: Failed) -> list[Instruction]:
        """Ends the run because a rank has failed."""
        how = "failed:" if event.exit_code is None else "called"
        return self._send(
            Abort(
                rank=-1,
                reason=f"rank {event.rank} {how} {event.error}",
                failed_rank=event.rank,
                traceback=event.traceback,
                exit_code=event.exit_code,
            )
        )

    def refuse(self, error: Exception, story: list[str]) -> list[Instruction]:
        """Ends the run because of an event that raised an error."""
        if isinstance(error, MismatchError | ConfigError):
            is_config = isinstance(error, ConfigError)
            return self.abort(str(error), kind="config" if is_config else "mismatch")
        if isinstance(error, NonFiniteError):
            return self._send(
                Abort(
                    rank=-1,
                    reason=str(error),
                    failed_rank=error.rank,
                    kind="non_finite",
                    batches=error.batches,
                    part=error.part,
                )
            )
        what = str(error) if isinstance(error, ElcheError) else repr(error)
        return self.abort(str(TransitionError(what, story)), kind="protocol")

    def _send(self, abort: Abort) -> list[Instruction]:
        """Sends an abort to every rank, and to those that wait to join."""
        self._sent = abort
        waiting = {refused.rank for refused in self._membership.reject_newcomers()}
        receivers = sorted(self._membership.ranks | waiting)
        return [replace(abort, rank=rank) for rank in receivers]

    def answer(self, event: Event) -> list[Instruction]:
        """Returns instructions for an event after the end."""
        if isinstance(event, (Left, RankLost)):
            self._membership.left[event.rank] = Left(rank=event.rank)
        elif isinstance(event, (Join, EpochOpened, BarrierReached)):
            assert self._sent is not None
            return [replace(self._sent, rank=event.rank)]
        return []
