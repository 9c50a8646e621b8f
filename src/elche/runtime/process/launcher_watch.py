"""End of a rank's process after the end of its launcher.

A training thread notices that only when it reads its connection: not while it
evaluates, loads, or reduces by hand. The launcher holds the other end of a pipe that a
thread of each rank reads; the system closes it however the launcher ends.
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
"""Grace (s) for a training thread that notices it, too, to end by an error."""


def watch_launcher(rank: int) -> None:
    """Starts the watch, if the launcher has passed a pipe to this process."""
    facts = launch_facts()
    descriptor = facts.pipe
    if descriptor < 0:
        return
    os.environ.update(replace(facts, pipe=-1).environment())
    if not _is_pipe(descriptor):
        return  # started by a rank, which keeps its pipe for itself
    write_whole_lines()
    signal_with_parent(signal.SIGCONT)
    os.set_inheritable(descriptor, False)
    threading.Thread(
        target=_end_with_launcher,
        args=(descriptor, rank),
        name="elche-launcher-watch",
        daemon=True,
    ).start()


def signal_with_parent(number: signal.Signals) -> None:
    """Makes the kernel signal this process when its parent ends.

    SIGCONT wakes a stopped process. The end of the parent's thread counts too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def ignore_signals() -> None:
    """Ignores signals that Slurm or a terminal sends to all processes of a job."""
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def process_state(pid: int) -> str:
    """Returns a process's state letter in /proc; "" if it is gone, "?" if unknown."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return "?"
    return found.rpartition(") ")[2][:1]


def write_whole_lines() -> None:
    """Makes a rank with unbuffered output write whole lines.

    Otherwise ranks that write to one file would split each other's lines.
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
