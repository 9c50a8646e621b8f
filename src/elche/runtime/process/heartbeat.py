"""Heartbeats of a rank, and of its training thread's stack if that is quiet.

A thread sends both, unless a call into C code holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import tempfile
import threading
import time
from typing import final

from elche.comm.control.control_channel import ControlChannel
from elche.coordination.liveness import BEAT_S, QUIET_S
from elche.errors import ElcheError
from elche.runtime.process.launcher_watch import END_AFTER_S, end_process

SHOWN_FRAMES = 4
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@final
class Heartbeat:
    """Thread that sends a heartbeat once a second.

    The training thread records when it is inside elche. Elsewhere this thread reports
    its Python stack.

    Args:
        channel: control channel to the coordinator.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._trainer = threading.get_ident()
        self._is_over = threading.Event()
        # Written by the training thread.
        self._seen_s = time.monotonic()
        self._waits_since_s: float | None = None
        self._thread = threading.Thread(
            target=self._run, name="elche-heartbeat", daemon=True
        )
        self._thread.start()

    def seen(self) -> None:
        """Records that the training thread is inside elche."""
        self._seen_s = time.monotonic()
        self._waits_since_s = None

    def waits(self) -> None:
        """Records that the training thread waits for other ranks."""
        self._seen_s = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = self._seen_s

    def close(self) -> None:
        """Stops the heartbeats."""
        self._is_over.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        with contextlib.suppress(ElcheError, OSError):  # the training thread sees it
            self._beat(time.monotonic())
            while not self._is_over.wait(BEAT_S):
                self._beat(time.monotonic())
        if self._channel.is_unreachable and not self._is_over.wait(END_AFTER_S):
            end_process("a rank ends: it cannot reach its coordinator")

    def _beat(self, now_s: float) -> None:
        since_s = self._waits_since_s
        is_quiet = now_s - (since_s or self._seen_s) >= QUIET_S
        stack = self._stack() if is_quiet and since_s is None else ""
        self._channel.beat(stack, waits=is_quiet and since_s is not None)

    def _stack(self) -> str:
        """Innermost frames of the training thread.

        `faulthandler` suspends that thread meanwhile. Walking ``f_back`` of a running
        thread's frames crashes CPython 3.11.
        """
        try:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                dumped = file.read().decode(errors="replace")
        except OSError:  # a full disk, no descriptor left: beat anyway
            return "an unknown place"
        header = rf"^(?:Current t|T)hread 0x0*{self._trainer:x}\b.*\n((?:  .*\n)*)"
        if (found := re.search(header, dumped, re.MULTILINE)) is None:
            return "an unknown place" if dumped.endswith("...\n") else "its end"
        frames = FRAME.findall(found[1])[:SHOWN_FRAMES]
        return " in ".join(f"{name} ({file}:{line})" for file, line, name in frames)
