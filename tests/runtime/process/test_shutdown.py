"""How a process ends: what it writes, and what it notes of its exit."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import pytest

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
