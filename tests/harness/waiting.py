"""Waits of tests: until something holds, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from elche.runtime.process.launcher_watch import process_state

MOST_S = 150.0


def until(
    condition: Callable[[], object], most_s: float = MOST_S, poll_s: float = 0.002
) -> None:
    """Returns as soon as the condition holds.

    Args:
        condition: asked again and again.
        most_s: longest wait, after which the test has failed.
        poll_s: between two questions.
    """
    deadline_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not come to hold in {most_s:g} s"
        time.sleep(poll_s)


def is_running(pid: int) -> bool:
    """True if a process of this host exists and is not stopped."""
    return process_state(pid) not in ("", *"?TtXZ")
