"""Requests to end a run early: from any thread, and by signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

from elche.errors import AbortedError

SIGNALS: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Signals with their default handlers; a user's own handler stays."""
REASONS: Final = ("stop", *(number.name for number in SIGNALS))
"""Reasons of an early end beside the training's own."""


@final
class StopRequest:
    """Request to stop a run, which the training thread reads between batches.

    Attributes:
        reason: one of `REASONS`; "" while the run continues.
        is_aborted: the run is to end without a result.
        is_over: the run has ended.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.is_aborted = self.is_over = False

    def stop(self, reason: str) -> None:
        """Requests an end with a result; the first reason counts."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Raises if an end without a result was requested.

        Raises:
            AbortedError: that end was requested.
        """
        if self.is_aborted:
            raise AbortedError("the training was aborted")


@final
class SignalStops:
    """Makes the first SIGINT or SIGTERM stop a run, and the second abort it.

    Args:
        request: stop request of that run.
        abort: called at the second signal; None: the default handler.
    """

    def __init__(
        self, request: StopRequest, abort: Callable[[], None] | None = None
    ) -> None:
        self._request = request
        self._abort = abort
        self._pid = os.getpid()
        self._replaced: dict[signal.Signals, Any] = {}

    def open(self) -> bool:
        """Replaces the default handlers; does nothing outside the main thread.

        Returns:
            True if both signals are handled here, or ignored (as SIGINT is in the
            background of a shell).
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number, default in SIGNALS.items():
            if signal.getsignal(number) == default:
                self._replaced[number] = default
                signal.signal(number, self._handle)
        mine = (self._handle, signal.SIG_IGN)
        return all(signal.getsignal(number) in mine for number in SIGNALS)

    def close(self) -> None:
        """Restores the default handlers, in the main thread."""
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._replaced.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._pid:  # a loader's process: it ends with its loader
            return
        if self._request.is_over:
            self.close()
            signal.raise_signal(number)
        elif not self._request.reason:
            self._request.stop(name)
            line = f"elche: {name}: training stops; a second signal ends it at once\n"
            os.write(2, line.encode())  # sys.stderr may be in use just now
        elif self._abort is not None:
            self._abort()
        else:
            self.close()
            signal.raise_signal(number)
