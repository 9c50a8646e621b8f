"""End of a rank's process when its launcher is gone.

A training thread sees that where it looks at its connection: not while it evaluates,
loads, or reduces by hand. The launcher holds the other end of a pipe that a thread of
each rank reads; the system closes it however the launcher ends. Where the coordinator
goes on, on another host, the launcher writes its address into it, as a line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import final

from elche.comm.control.addresses import parse_address
from elche.runtime.process.rank_output import write_whole_lines

PIPE = "ELCHE_LAUNCHER_PIPE"
PR_SET_PDEATHSIG = 1
END_AFTER_S = 5.0
"""Within which a training thread that sees it as well may end by an error."""


@final
class _Moves:
    """Where the coordinator has gone, as the watching thread has read.

    Attributes:
        address: of it now; None: where it was at the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._follow: Callable[[tuple[str, int]], None] | None = None
        self.address: tuple[str, int] | None = None

    def take(self, line: str) -> None:
        """The launcher has written an address."""
        with self._lock:
            self.address = parse_address(line, "the coordinator's address")
            if self._follow is not None:
                self._follow(self.address)

    def follow(self, follow: Callable[[tuple[str, int]], None]) -> None:
        """Has this called where the coordinator moves, at once if it has."""
        with self._lock:
            self._follow = follow
            if self.address is not None:
                follow(self.address)


moves = _Moves()


def watch_launcher(rank: int) -> None:
    """Begins to watch, where the launcher has handed a pipe to this process."""
    descriptor = int(os.environ.pop(PIPE, "-1"))
    if descriptor < 0 or not _is_pipe(descriptor):
        return  # started by a rank, which keeps its pipe for itself
    write_whole_lines()
    wake_with_parent()
    os.set_inheritable(descriptor, False)
    threading.Thread(
        target=_end_with_launcher,
        args=(descriptor, rank),
        name="elche-launcher-watch",
        daemon=True,
    ).start()


def wake_with_parent() -> None:
    """Continues this process, if it is stopped, when its parent ends: it sees that.

    No SIGKILL: a thread's end in the parent counts as well, and ranks end in order.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _end_with_launcher(descriptor: int, rank: int) -> None:
    begun = b""
    while data := os.read(descriptor, 4096):
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            moves.take(line.decode())
    time.sleep(END_AFTER_S)
    text = f"elche: rank {rank} ends, since its launcher has ended or was killed\n"
    os.write(2, text.encode())
    os._exit(1)
