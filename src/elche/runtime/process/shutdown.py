"""Leave or abort notification at process exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from elche.coordination.protocol.events import Failed
from elche.runtime.process.connect import stop_coordinator


def failure_of(rank: int, error: BaseException, hint: str = "") -> Failed:
    """Makes the `Failed` event of the exception that ends this rank."""
    summary = traceback.format_exception_only(error)[-1].strip()
    return Failed(
        rank=rank,
        error=f"{summary}; {hint}" if hint else summary,
        traceback="".join(traceback.format_exception(error)),
    )


def counted_hint(error: BaseException, policy: str) -> str:
    """Advice against counting batches with ``next()``, or ""."""
    ends = any(isinstance(e, StopIteration) for e in (error, error.__cause__))
    if not ends or policy == "sync":
        return ""
    return (
        f"under policy {policy!r} a rank trains its part of an epoch, not len(loader) "
        "batches; write `for batch in loader:`, or `for batch in loader.steps(n):` to "
        "count steps of the run"
    )


def write_whole(text: str) -> None:
    """Writes to standard error in one call, so that other processes split no line."""
    try:
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))
    except (OSError, ValueError, AttributeError):  # replaced by the user
        sys.stderr.write(text)


class ExitWatch:
    """Records calls of ``sys.exit`` in the main thread of this process.

    A closed generator cannot distinguish a ``break`` from an exception.

    Attributes:
        code: exit code of the last call, or None; a loop that continues has caught the
            exception, and resets it.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._pid = 0

    def attach(self) -> None:
        """Starts recording, for the rest of the process."""
        self._pid, leave = os.getpid(), sys.exit

        def note_and_exit(status: Any = None) -> NoReturn:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and os.getpid() == self._pid:  # not in a forked worker
                is_number = isinstance(status, int)
                self.code = status if is_number else int(status is not None)
            leave(status)

        sys.exit = note_and_exit


exit_watch = ExitWatch()


def watch_process(
    on_failure: Callable[[BaseException], None], on_exit: Callable[[], None]
) -> None:
    """Registers exit callbacks of this process; to be called once.

    Args:
        on_failure: called with an uncaught exception, before it is printed.
        on_exit: called at the interpreter's exit, before the coordinator is stopped.
    """
    previous, own = sys.excepthook, os.getpid()

    def on_exception(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == own:  # not in a forked worker, which may outlive it
            on_failure(error)
        if previous is sys.__excepthook__:
            write_whole("".join(traceback.format_exception(error)))
        else:
            previous(kind, error, trace)

    sys.excepthook = on_exception
    atexit.register(stop_coordinator)
    atexit.register(on_exit)
