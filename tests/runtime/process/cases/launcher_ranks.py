"""A rank that trains nothing and needs no torch: `launcher_ranks.py CASE FOLDER`.

It shows what the launcher does with ranks that end, hear, and do not hear.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elche.comm.control.control_channel import ControlChannel
from elche.coordination.protocol.events import Failed
from elche.coordination.protocol.instructions import Abort

RANK = int(os.environ["RANK"])
WAIT_S = 200.0


def _connected() -> ControlChannel:
    host, _, port = os.environ["ELCHE_COORDINATOR"].rpartition(":")
    key = bytes.fromhex(os.environ["ELCHE_KEY"])
    return ControlChannel.connect((host, int(port)), key, RANK, WAIT_S)


def _say(what: str) -> None:
    print(f"rank {RANK} is {what}", flush=True)


def _outlive(pid: Path) -> None:
    """Waits for the end of the process whose number another rank has written."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            os.kill(int(pid.read_text()), 0)
        except (FileNotFoundError, ValueError):
            pass  # not written yet
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise TimeoutError(f"the process of {pid} has not ended")


def _write_pid(path: Path) -> None:
    path.write_text(str(os.getpid()))


def deaf(folder: Path) -> None:
    """Hears that the run has ended, and stays."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = _connected()
    _say("ready")
    assert isinstance(channel.receive(WAIT_S, "the end"), Abort)
    _say("told")
    while True:
        signal.pause()


def first(folder: Path) -> None:
    """Rank 0 handles SIGTERM, and both hear that the run has ended."""
    got = list[int]()
    if RANK == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    channel = _connected()
    channel.store_set(f"here {RANK}", b"")
    channel.store_get(f"here {RANK}", WAIT_S)  # by now the launcher was notified
    _say("ready")
    assert isinstance(channel.receive(WAIT_S, "the end"), Abort)
    while RANK == 0 and not got:
        time.sleep(0.01)
    _say(f"through with {len(got)} signals")
    sys.exit(1)


def apart(folder: Path) -> None:
    """Has nothing to do with the coordinator."""
    _say("ready")
    while True:
        signal.pause()


def blamed(folder: Path) -> None:
    """Rank 1 fails and ends last, of code 7; rank 0 ends because it is told so."""
    channel = _connected()
    pid = folder / "0"
    if RANK == 0:
        _write_pid(pid)
        assert isinstance(channel.receive(WAIT_S, "the end"), Abort)
        sys.exit(1)
    channel.send(Failed(rank=1, error="ValueError: x", traceback=""))
    _outlive(pid)
    os._exit(7)


def earlier(folder: Path) -> None:
    """Rank 1 is killed; rank 0 ends after it, of code 1. Neither says anything."""
    pid = folder / "1"
    if RANK == 0:
        _outlive(pid)
        sys.exit(1)
    _write_pid(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def environment(folder: Path) -> None:
    """Prints what it finds there."""
    for name, value in sorted(os.environ.items()):
        print(f"{name}={value}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
