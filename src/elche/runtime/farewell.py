"""How a process leaves its run: at its end, and when an exception ends it."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from elche.runtime.connect import stop_coordinator


def watch_process(
    on_failure: Callable[[BaseException], None], on_exit: Callable[[], None]
) -> None:
    """Calls these when this process ends; to be asked for once.

    Args:
        on_failure: told of an uncaught exception, before it is printed.
        on_exit: called at the interpreter's exit, before the coordinator is stopped.
    """
    previous = sys.excepthook

    def on_exception(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        on_failure(error)
        previous(kind, error, trace)

    sys.excepthook = on_exception
    atexit.register(stop_coordinator)
    atexit.register(on_exit)
