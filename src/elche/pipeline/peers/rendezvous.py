"""Store of the ranks' addresses, for the lifetime of the run."""

from __future__ import annotations

import time
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.errors import CommunicationError, DeadlineError, RemoteRankError

LOOK_EVERY_S = 0.1


@final
class Rendezvous:
    """The coordinator's store, watched: a wait in it ends when the run does.

    It stands for the channel where a process group is formed.

    Args:
        channel: to the coordinator.
        rank: this rank.
        timeout_s: the longest wait.
    """

    def __init__(self, channel: ControlChannel, rank: int, timeout_s: float) -> None:
        self._channel = channel
        self._rank = rank
        self._timeout_s = timeout_s

    def store_set(self, key: str, value: bytes) -> None:
        """Publishes a value for other ranks."""
        self._channel.store_set(key, value)

    def store_get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value that a rank publishes.

        Raises:
            RemoteRankError: another rank has failed meanwhile.
            CommunicationError: the coordinator is gone.
            DeadlineError: the value was not published in time.
        """
        timeout_s = min(timeout_s, self._timeout_s)
        until_s = time.monotonic() + timeout_s
        while True:
            check_for_abort(self._channel)
            left_s = until_s - time.monotonic()
            try:
                return self._channel.store_get(key, min(LOOK_EVERY_S, max(0.0, left_s)))
            except CommunicationError as error:
                if not isinstance(error, DeadlineError):
                    check_for_abort(self._channel)  # it may have said why
                    raise
                if left_s <= 0:
                    raise DeadlineError(
                        f"rank {self._rank} waited {timeout_s:g} s for the other ranks "
                        "to make the same Pipeline; start all of them, and look at "
                        "their own output"
                    ) from error


def check_for_abort(channel: ControlChannel) -> None:
    """Raises when the run has been ended.

    Raises:
        RemoteRankError: it has; says why.
        CommunicationError: the coordinator is gone.
    """
    abort = channel.find_abort()
    if abort is not None:
        raise RemoteRankError(abort.reason, abort.failed_rank, abort.traceback)
