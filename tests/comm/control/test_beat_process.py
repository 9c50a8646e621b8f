"""The process that beats for a rank, without the rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elche.comm.control import beat_process
from elche.comm.control.frames import HELLO_BYTES, FrameCodec

WAIT_S = 200.0
KEY, NONCE = b"k" * 32, b"n" * 16
ALIVE = {"type": "Alive", "rank": 3}
RANK = """
import os, subprocess, sys, time
command, sends = [sys.executable, "-I", "-S", sys.argv[1], ".005"], int(sys.argv[2])
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sends, bufsize=0)
os.close(sends)
child.stdin.write(sys.argv[3].encode())
if os.fork() == 0:  # as a loader's worker: holds what the rank holds, and lives on
    time.sleep(1000)
    os._exit(0)
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def rank() -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    ours, theirs = socket.socketpair()
    line = FrameCodec(KEY, NONCE, is_server=False).repeats(ALIVE).decode()
    number = theirs.fileno()
    given = [beat_process.__file__, str(number), line]
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, *given],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(number,),
        start_new_session=True,
    )
    theirs.close()
    ours.settimeout(WAIT_S)
    with ours, process:
        yield process, ours
        os.killpg(process.pid, signal.SIGKILL)


def test_it_beats_through_signals_until_its_rank_is_killed(
    rank: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    process, ours = rank
    assert process.stdout is not None
    beating = int(process.stdout.readline())
    codec, messages = FrameCodec(KEY, NONCE, is_server=True), list[object]()
    messages += codec.feed(ours.recv(HELLO_BYTES))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(beating, number)  # as Slurm does to all processes of a step
    while len(messages) < 10:
        data = ours.recv(HELLO_BYTES)
        assert data, "it has ended"
        messages += codec.feed(data)
    assert messages[0] == messages[-1] == ALIVE
    process.kill()
    while data := ours.recv(HELLO_BYTES):  # its own end closes the connection
        messages += codec.feed(data)
