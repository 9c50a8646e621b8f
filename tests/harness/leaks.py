"""Finds what a test left behind: child processes and non-daemon threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02


@dataclass(frozen=True)
class Snapshot:
    """What runs in this process at one moment.

    Attributes:
        pids: living descendants of this process, zombies left out.
        threads: non-daemon threads.
    """

    pids: frozenset[int]
    threads: frozenset[threading.Thread]


NOTHING = Snapshot(frozenset(), frozenset())


def end_runs() -> None:
    """Ends a run and pipelines that a test left open, which the next ones would find.

    Pure tests import no torch.
    """
    if session := sys.modules.get("elche.session.process"):
        session.shutdown()
    if states := sys.modules.get("elche.pipeline.checkpoints.pipeline_state"):
        for one in [*states._open]:
            if state := one():
                state.close(has_failed=True)


def adopt_orphans() -> bool:
    """Make this process the parent of its descendants' orphans (Linux).

    A worker whose launcher was killed moves under this process instead of under
    init, where nobody would find it.

    Returns:
        Whether the system can do it.
    """
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def snapshot(allowed_pids: Set[int] = frozenset()) -> Snapshot:
    """Returns what runs now, `allowed_pids` and their descendants left out."""
    multiprocessing.active_children()  # reaps those that have ended
    return Snapshot(
        pids=frozenset(_descendants(allowed_pids | _server_pids())),
        threads=frozenset(
            t for t in threading.enumerate() if t.is_alive() and not t.daemon
        ),
    )


def leaks_since(
    before: Snapshot, grace_s: float, allowed_pids: Callable[[], Set[int]] = frozenset
) -> list[str]:
    """Describes what runs now and did not run before, and kills the processes.

    Args:
        before: the snapshot to compare with.
        grace_s: how long something that is just ending may take.
        allowed_pids: asks for the processes that may stay.

    Returns:
        One line per leak; empty when there is none.
    """

    def new() -> Snapshot:
        now = snapshot(allowed_pids())
        return Snapshot(now.pids - before.pids, now.threads - before.threads)

    if new() == NOTHING:
        return []
    gc.collect()  # a loader in a reference cycle still holds its workers
    deadline_s = time.monotonic() + grace_s
    while (left := new()) != NOTHING and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    lines = [f"process {pid}: {_command_of(pid)}" for pid in sorted(left.pids)]
    lines += [f"non-daemon thread {thread.name!r}" for thread in left.threads]
    for pid in left.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return lines


def _descendants(but: Set[int]) -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # no child at all: spares most tests the walk through /proc
    children: dict[int, list[int]] = {}
    for pid, parent, state in _processes():
        if state != "Z" and pid not in but:
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    frontier = [os.getpid()]
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            found.add(pid)
            frontier.append(pid)
    return found


def _processes() -> Iterable[tuple[int, int, str]]:
    """Yields (pid, parent's pid, state) from /proc, or the children known here."""
    if not Path("/proc/self/stat").exists():
        for child in multiprocessing.active_children():
            if child.pid is not None:
                yield child.pid, os.getpid(), "R"
        return
    for name in filter(str.isdigit, os.listdir("/proc")):  # twice a test: without Path
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/stat", "rb", buffering=0) as stat,
        ):
            # The command stands in parentheses and may hold any character.
            state, parent = stat.read(1024).rpartition(b")")[2].split(None, 2)[:2]
            yield int(name), int(parent), state.decode()


def _server_pids() -> frozenset[int]:
    """Resource tracker and fork server live as long as the interpreter, by design."""
    found = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    return frozenset(pid for pid in found if pid is not None)


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(ended meanwhile)"
    return b" ".join(words).decode(errors="replace").strip()[:200]
