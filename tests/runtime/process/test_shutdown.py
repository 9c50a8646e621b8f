"""How a process ends: what it writes, what it notes, and where a thread of it is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elche.runtime.process.heartbeat import Heartbeat
from elche.runtime.process.shutdown import ExitWatch, write_whole


def test_lines_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a traceback was many writes, and ranks wrote into each other's."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a write, a record
    with ours, theirs, theirs.makefile("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        write_whole("one\ntwo\n" * 1000)
        assert ours.recv(1 << 16).decode() == "one\ntwo\n" * 1000


def test_a_replaced_standard_error_is_written_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_whole("one\ntwo\n")
    assert capsys.readouterr().err == "one\ntwo\n"


@pytest.mark.parametrize(
    ("status", "code"), [(None, 0), (0, 0), (3, 3), ("no data", 1)]
)
def test_calls_of_sys_exit_are_noted(
    monkeypatch: pytest.MonkeyPatch, status: object, code: int
) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)
    watch = ExitWatch()
    watch.attach()

    def end_thread() -> None:
        with contextlib.suppress(SystemExit):
            sys.exit(5)

    thread = threading.Thread(target=end_thread)
    thread.start()
    thread.join()
    assert watch.code is None, "a thread ends itself alone"
    with pytest.raises(SystemExit, match=r"^(None|0|3|no data|)$") as caught:
        sys.exit(status)
    assert caught.value.code == status
    assert watch.code == code


SCRIPT = """
import os, sys
from elche.runtime.process.shutdown import watch_process

def fail():
    error = ConnectionResetError("of its dead parent")  # as multiprocessing reports it
    sys.excepthook(type(error), error, None)

watch_process(lambda error: os.write(1, b"failed "), lambda: None)
if os.fork() == 0:
    fail()
    os._exit(0)
os.wait()
os.write(1, b"waited ")
fail()
"""


def test_only_the_rank_itself_says_that_it_has_failed() -> None:
    """Once: a killed rank's loader worker ended the run that had outlived it."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.stdout.split() == [b"waited", b"failed"]
    assert done.stderr.count(b"ConnectionResetError: of its dead parent") == 2


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
