"""What a call costs in lines of Python run: the same on any machine, however busy."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], Any]) -> int:
    """Returns how many lines `call` runs in this thread, those of what it calls too.

    A line that a loop comes back to counts each time. Loops inside of built-in
    functions do not count, they are written in C. Python's collector rests meanwhile:
    finalisers of somebody else's garbage would be counted too.
    """
    count = 0

    def count_lines(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return count_lines

    before = sys.gettrace()
    collects = gc.isenabled()
    assert threading.current_thread() is threading.main_thread()
    gc.disable()
    sys.settrace(count_lines)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
