"""Process groups formed where ranks may die meanwhile.

gloo's connecting cannot be broken off: it waits for ranks that have published where
they listen, and died since. So a thread of its own does that, and is left to itself
when it is too late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError

LOOK_S = 0.001
CHECK_S = 0.002


@final
class _Rendezvous:
    """The channel's values for a thread that may send on it, and not read."""

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


def form_watched(
    channel: ControlChannel,
    rank: int,
    world_size: int,
    name: int | str,
    listen: str,
    timeout_s: float,
    check: Callable[[], None],
) -> Group:
    """As `Group.form`, but ``check`` may end it.

    Args:
        channel: to the coordinator, where ranks find each other's addresses.
        rank: place of this rank.
        world_size: ranks of the group.
        name: of the group.
        listen: address that gloo listens on.
        timeout_s: deadline.
        check: called now and then, and reads the channel; raises if it is over.

    Raises:
        CommunicationError: the ranks did not come together in time.
    """
    meeting = _Rendezvous(channel)
    made: list[Group] = []
    errors: list[BaseException] = []

    def form() -> None:
        try:
            made.append(Group.form(meeting, rank, world_size, name, listen, timeout_s))
        except BaseException as error:
            errors.append(error)
        if meeting.is_over and made:
            made.pop().leave()

    thread = threading.Thread(target=form, name="elche-forming", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            channel.wait_for_values(CHECK_S)
            check()
    except BaseException:
        meeting.is_over = True
        raise
    if errors:
        raise errors[0]
    return made[0]
