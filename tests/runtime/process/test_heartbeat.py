"""Stack of a training thread that is quiet."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from elche.runtime.process.heartbeat import Heartbeat


def test_a_quiet_thread_is_found_until_it_ends() -> None:
    begun, goes_on, trainers = threading.Event(), threading.Event(), list[int]()

    def trains() -> None:
        trainers.append(threading.get_ident())
        begun.set()
        goes_on.wait()

    thread = threading.Thread(target=trains)
    thread.start()
    begun.wait()
    silent = cast(Any, SimpleNamespace(_trainer=trainers[0]))
    stack = Heartbeat._stack(silent)
    goes_on.set()
    thread.join()
    assert f" in trains ({__file__}:" in stack
    assert Heartbeat._stack(silent) == "its end"
