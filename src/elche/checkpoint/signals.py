"""SIGTERM and SIGINT to a process that makes checkpoints: one more, and the end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Final, final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@final
class LastCheckpoint:
    """Notes the first signal; the second ends the process as it would have.

    Attributes:
        number: of the signal, 0 before it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._pid = 0
        self._before: dict[signal.Signals, Any] = {}

    def attach(self) -> bool:
        """Begins to note them, in a main thread; whether they are noted."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._before or not is_main:
            return bool(self._before)
        self._pid = os.getpid()
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._take)
        return True

    def detach(self) -> None:
        """Puts back what handled them before."""
        self.number = 0
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                signal.signal(number, before or signal.SIG_DFL)
        self._before.clear()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number or os.getpid() != self._pid:  # a forked child makes none
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
