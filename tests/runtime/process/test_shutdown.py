"""How a process ends: what it writes, and what it notes of its exit."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading

import pytest

from elche.runtime.process import shutdown
from elche.runtime.process.shutdown import ExitWatch, write_whole


def test_lines_reach_a_pipe_whole_and_a_file_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    """Once: a traceback was many writes, and ranks wrote into each other's."""
    text = "".join(f"line {number} {'x' * 90}\n" for number in range(200)) + "last"
    pieces: list[bytes] = []

    def write(descriptor: int, data: bytes) -> int:
        pieces.append(data)
        return len(data)

    monkeypatch.setattr(shutdown.os, "write", write)
    reads, writes = os.pipe()
    with os.fdopen(reads), os.fdopen(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        write_whole(text)
        assert all(len(piece) <= select.PIPE_BUF for piece in pieces)
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])
        assert b"".join(pieces).decode() == text
        assert 4 < len(pieces) < 8
    pieces.clear()
    with open(os.path.join(tmp_path, "output"), "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        write_whole(text)
    assert [piece.decode() for piece in pieces] == [text]


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
