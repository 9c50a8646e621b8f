"""`elche run` in a terminal: progress, the ranks' own lines, and the timeline."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from elche.monitor.run_history import RunHistory
from elche.runtime.process.local_ranks import pass_on

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "cases" / "watched.py"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(*arguments: str) -> tuple[int, str]:
    """Exit code, and everything that `elche run` wrote to a terminal."""
    ours, theirs = pty.openpty()
    size = struct.pack("HHHH", 40, 150, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    command = [sys.executable, "-m", "elche", "run", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 1 << 16):
                written += piece
        except OSError:  # the other side is closed
            pass
        finally:
            os.close(ours)
    return process.returncode, written.decode()


def batches_of(path: Path) -> dict[int, list[str]]:
    trace: dict[str, Any] = json.loads(path.read_text())
    found: dict[int, list[str]] = {0: [], 1: []}
    for each in trace["traceEvents"]:
        if each["ph"] == "X" and each["cat"] == "batch":
            found[each["pid"]].append(each["name"])
    return found


def test_a_run_that_fails_is_seen_until_then(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, written = in_terminal(
        *("--speeds", "1,0.5", "--trace", str(trace), "--events", str(tmp_path)),
        *(str(SCRIPT), "raises"),
    )
    assert code == 1
    assert re.search(r"epoch 0 \(sync\).* of 640 samples", written)
    assert "CPU emulated at speed 0.5" in written
    lines = [line.strip() for line in ESCAPES.sub("\n", written).splitlines()]
    for rank in (0, 1):
        for number in (1, 2, 3):
            assert f"rank {rank} printed [line] {number}" in lines
    assert "RuntimeError: as asked" in lines
    found = batches_of(trace)
    assert found[0]
    assert len(found[1]) > 10
    facts = json.loads(trace.read_text())["otherData"]
    assert "as asked" in facts["ended by"]
    history = RunHistory()
    history.feed((tmp_path / "events.jsonl").read_text())
    died, error = history.events[-2:]  # advice on the policy may come before
    assert (died["name"], died["rank"], error["name"]) == ("died", 1, "error")
    assert died["text"] == "failed: RuntimeError: as asked"
    assert history.end is not None
    assert history.end["exit_codes"] == [1, 1]
    marks = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "i"]
    assert len(marks) == len(history.events)


def test_no_lines_end_is_written_apart_from_it() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a write, a record
    command = ["-m", "elche", "run", "--speeds", "1,1", str(SCRIPT), "ends"]
    with (
        ours,
        subprocess.Popen(
            [sys.executable, *command],
            stdout=theirs,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        theirs.close()
        written = list(iter(lambda: ours.recv(1 << 16), b""))
    assert process.returncode == 0
    lines = [b"rank %d printed [line] %d\n" % (r, n) for r in (0, 1) for n in (1, 2, 3)]
    assert sorted(written) == lines


def shown(*pieces: bytes) -> list[str]:
    """What of a rank's output is shown, that comes in these pieces."""

    async def show() -> list[str]:
        stream, lines = asyncio.StreamReader(), list[str]()
        passing = asyncio.ensure_future(pass_on(stream, lines.append))
        for piece in pieces:
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()
        await passing
        return lines

    return asyncio.run(show())


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"one\ntwo\n",), ["one", "two"]),
        ((b"o", b"ne\r\n\nla", b"st"), ["one", "", "last"]),
        ((b"\r 10 %", b"\r 20", b" %\r", b"\r100 %\n"), ["100 %"]),
        ((b"\r 10 %\r 20 %\r",), [" 20 %"]),
        ((b"caf\xc3", b"\xa9\n"), ["café"]),
    ],
)
def test_lines_are_whole_and_of_a_bar_the_last_is_shown(
    pieces: tuple[bytes, ...], expected: list[str]
) -> None:
    assert shown(*pieces) == expected
