"""End of a rank's process when its launcher is gone.

A training thread sees that where it looks at its connection: not while it evaluates,
loads, or reduces by hand. The launcher holds the other end of a pipe that a thread of
each rank reads; the system closes it however the launcher ends.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from elche.runtime.process.launchers import launch_facts

PR_SET_PDEATHSIG = 1
END_AFTER_S = 5.0
"""Within which a training thread that sees it as well may end by an error."""


def watch_launcher(rank: int) -> None:
    """Begins to watch, where the launcher has handed a pipe to this process."""
    facts = launch_facts()
    descriptor = facts.pipe
    if descriptor < 0:
        return
    os.environ.update(replace(facts, pipe=-1).environment())
    if not _is_pipe(descriptor):
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


def ignore_signals() -> None:
    """Ignores what Slurm or a terminal sends to all processes of a job."""
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def is_running(pid: int) -> bool:
    """Returns True if a process of this host exists and is not stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"TtXZ"


def write_whole_lines() -> None:
    """In a rank whose output is unbuffered: no line's end is written apart from it.

    Ranks may write to one file, where a line of another would stand between the two.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def end_process(why: str) -> NoReturn:
    """Ends this process at once, whatever its other threads do."""
    os.write(2, f"elche: {why}\n".encode())
    os._exit(1)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _end_with_launcher(descriptor: int, rank: int) -> None:
    while os.read(descriptor, 4096):
        pass
    time.sleep(END_AFTER_S)
    end_process(f"rank {rank} ends, since its launcher has ended or was killed")
