"""Waits for other ranks: deadlines, failures, and the wait-for graph."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.comm.transport.process_group import CHECK_EVERY_S
from elche.coordination.protocol.instructions import Regroup
from elche.errors import (
    CommunicationError,
    DeadlineError,
    ElcheError,
    RankLostError,
    RemoteRankError,
    named_ranks,
)

BEYOND_S = 60.0
"""Excess (s) of gloo's timeout over elche's deadlines, whose errors name ranks."""
TELL_S = 1.0
"""Longest wait (s) for the coordinator to send another rank's published wait."""
NAMED_AFTER_S = 10.0
"""Minimum wait (s) after which the log names the late rank."""
NAMED_AFTER_WAITS = 4
"""Multiple of the longest wait so far after which the log names the late rank."""
REPORT_EVERY_S = 0.5
"""Minimum time (s) between two reports of progress."""
REASON_WITHIN_S = 5.0
"""Longest wait (s) for the coordinator to send the reason for a lost connection."""

logger = logging.getLogger(__name__)


@final
class Waits:
    """This rank's waits for others; the coordinator stores long waits of all ranks.

    A rank is late if others wait for it and it has published no wait of its own.
    Process groups also use this object as their `RendezvousChannel`.

    Args:
        channel: control channel to the coordinator.
        rank: this rank.
        name: the pipeline's name in the coordinator's store.
    """

    def __init__(self, channel: ControlChannel, rank: int, name: str) -> None:
        self._channel = channel
        self._rank = rank
        self._name = name
        self._longest_s = self._reported_s = 0.0

    def await_reason(self) -> None:
        """Checks for a moment whether the reason for a lost connection has arrived.

        Raises:
            See `check`.
        """
        until_s = time.monotonic() + REASON_WITHIN_S
        while time.monotonic() < until_s:
            self.check()
            time.sleep(CHECK_EVERY_S)

    def check(self) -> None:
        """Raises if the run has ended.

        Raises:
            RemoteRankError: the run has ended; the message has the reason.
            RankLostError: a replica is lost, and the others continue.
            CommunicationError: the coordinator has disconnected.
        """
        abort = self._channel.find_abort()
        if abort is not None:
            raise RemoteRankError(abort.reason, abort.failed_rank, abort.traceback)
        if lost := self._channel.waiting(Regroup):
            ranks = [rank for one in lost for rank in one.left]
            raise RankLostError(
                f"ranks {ranks} were lost during a call that cannot be repeated; only "
                "step and clip_grad_norm_ can; `elche run --max-restarts` restarts "
                "such a run from its last checkpoint"
            )

    def store_set(self, key: str, value: bytes) -> None:
        """Publishes a value for other ranks."""
        self._channel.store_set(key, value)

    def store_get(self, key: str, timeout_s: float) -> bytes:
        """Waits for another rank's published value; raises if the run ends.

        `timeout_s` is gloo's deadline, `BEYOND_S` later than ours.

        Raises:
            DeadlineError: the value was not published in time. Others as `check`.
        """
        timeout_s -= BEYOND_S
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self._channel.store_get(key, min(left_s, TELL_S))
            except CommunicationError as error:
                self.check()  # raises the run's abort, which may have the reason
                if not isinstance(error, DeadlineError):
                    raise
                if left_s > TELL_S:
                    continue
            raise DeadlineError(
                f"rank {self._rank} waited {timeout_s:g} s for the other ranks to make "
                "the same Pipeline; start all of them, and look at their own output"
            )

    def until(
        self,
        look: Callable[[], bool],
        ranks: Sequence[int],
        what: str,
        timeout_s: float,
    ) -> None:
        """Waits until `look` returns True; it polls for a moment at each call.

        The log names a rank that is unusually late.

        Raises:
            DeadlineError: the deadline has passed; the message names the late ranks.
            CommunicationError: a connection is lost: `look` raised RuntimeError.
            RemoteRankError: the run has ended.
        """
        started_s, reported = time.monotonic(), dict[int, str]()
        named_after_s = max(NAMED_AFTER_S, NAMED_AFTER_WAITS * self._longest_s)
        is_published = is_named = False
        while not self._has_come(look, ranks, what):
            self.check()
            waited_s = time.monotonic() - started_s
            if waited_s > min(timeout_s, named_after_s) / 2 and not is_published:
                is_published = True
                self._publish(f"{','.join(map(str, ranks))} {what}")
            if waited_s > timeout_s:
                late, seen = self._follow(ranks)
                if any(late[rank] != reported.get(rank, "") for rank in late):
                    started_s, reported = time.monotonic(), late
                    continue
                raise DeadlineError(
                    f"rank {self._rank} waited {timeout_s:.1f} s for "
                    f"{named_ranks(ranks)}: {what}; {_explained([*late], seen)}"
                )
            if waited_s > named_after_s and not is_named:
                is_named = True
                self._name_late(ranks, what, timeout_s)
        self._longest_s = max(self._longest_s, time.monotonic() - started_s)
        if is_published:
            self._publish("")

    def _has_come(
        self, look: Callable[[], bool], ranks: Sequence[int], what: str
    ) -> bool:
        try:
            return look()
        except ElcheError:
            raise
        except RuntimeError as error:
            self.await_reason()
            raise CommunicationError(
                f"rank {self._rank} lost {named_ranks(ranks)} while waiting for "
                f"{what}: {error}; it has ended, or closed its pipeline before this "
                "rank did: look at its own output"
            ) from error

    def _name_late(self, ranks: Sequence[int], what: str, timeout_s: float) -> None:
        for rank, progress in self._follow(ranks)[0].items():
            if rank not in ranks:
                continue
            if progress:
                logger.info("rank %d is busy: %s, %s", rank, what, progress)
                continue
            logger.warning(
                "the pipeline has waited %.0f s for rank %d: %s; that rank is late, "
                "and waits for no other: look at its own output; the limit is %g s "
                "(timeout_s)",
                *(NAMED_AFTER_S, rank, what, timeout_s),
            )

    def _follow(self, ranks: Sequence[int]) -> tuple[dict[int, str], list[int]]:
        """Late ranks with their reports, and all ranks on the wait path to them."""
        seen, late = [self._rank], dict[int, str]()
        to_ask = list(ranks)
        while to_ask:
            rank = to_ask.pop(0)
            if rank in seen:
                continue
            seen.append(rank)
            awaited, _, text = self._waits_of(rank).partition(" ")
            if awaited:
                to_ask += map(int, awaited.split(","))
            else:
                late[rank] = text
        return late, seen

    def _waits_of(self, rank: int) -> str:
        """A rank's published wait or report; "" if there is none."""
        self._channel.store_forget(self._key(rank))
        try:
            return self._channel.store_get(self._key(rank), TELL_S).decode()
        except CommunicationError:
            return ""

    def report(self, text: str) -> None:
        """Reports progress ("" at its end); restarts the waits for this rank."""
        now_s = time.monotonic()
        if not text or now_s - self._reported_s > REPORT_EVERY_S:
            self._reported_s = now_s
            self._publish(f" {text}")

    def _publish(self, text: str) -> None:
        with contextlib.suppress(CommunicationError):
            self._channel.store_set(self._key(self._rank), text.encode())

    def _key(self, rank: int) -> str:
        return f"{self._name}/waits/{rank}"


def _explained(late: Sequence[int], seen: Sequence[int]) -> str:
    """Text that names the late ranks, or else the ranks that wait for each other."""
    if not late:
        return f"{named_ranks(seen)} wait for each other"
    verb = "is late, and waits" if len(late) == 1 else "are late, and wait"
    return f"{named_ranks(late)} {verb} for no other rank"
