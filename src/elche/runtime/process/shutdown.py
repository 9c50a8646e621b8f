"""Leave or abort notification at process exit."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from elche.coordination.protocol.events import Failed
from elche.runtime.process.connect import stop_coordinator


def failure_of(rank: int, error: BaseException, hint: str = "") -> Failed:
    """The report to the other ranks of the exception that ends this one."""
    summary = traceback.format_exception_only(error)[-1].strip()
    return Failed(
        rank=rank,
        error=f"{summary}; {hint}" if hint else summary,
        traceback="".join(traceback.format_exception(error)),
    )


def watch_process(
    on_failure: Callable[[BaseException], None], on_exit: Callable[[], None]
) -> None:
    """Registers what is called when this process ends; to be called once.

    Args:
        on_failure: called with an uncaught exception, before it is printed.
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
