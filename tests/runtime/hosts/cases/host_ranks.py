"""A rank that trains nothing and needs no torch: `host_ranks.py CASE FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from elche.comm.control.addresses import parse_address
from elche.comm.control.control_channel import ControlChannel, heeds_key
from elche.coordination.protocol.events import Failed
from elche.coordination.protocol.instructions import Abort

RANK = int(os.environ["RANK"])
WAIT_S = 100.0


def _connected() -> ControlChannel:
    address = parse_address(os.environ["ELCHE_COORDINATOR"], "the coordinator")
    key = bytes.fromhex(os.environ["ELCHE_KEY"])
    channel = ControlChannel.connect(address, key, RANK, WAIT_S)
    channel.store_set(f"here {RANK}", b"")
    channel.store_get(f"here {RANK}", WAIT_S)  # by now the coordinator has said so
    return channel


def _say(what: str) -> None:
    print(f"rank {RANK} is {what}", flush=True)


def places(folder: Path) -> None:
    """Prints what it finds in its environment."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        _say(f"{name}={os.environ[name]}")
    _say(f"ELCHE_POLICY={os.environ.get('ELCHE_POLICY')}")
    _say(f"ELCHE_LISTEN={os.environ['ELCHE_LISTEN']}")


def waits(folder: Path) -> None:
    """Is connected, and ends when it is told of the run's end."""
    channel = _connected()
    channel.store_set(f"waits {RANK}", b"")
    _say("ready")
    told = channel.receive(WAIT_S, "the end")
    assert isinstance(told, Abort)
    _say(f"told: {told.reason}")
    sys.exit(1)


def fails(folder: Path) -> None:
    """The last rank fails, and exits with code 7."""
    if int(os.environ["WORLD_SIZE"]) - 1 != RANK:
        waits(folder)
    channel = _connected()
    for other in range(RANK):  # else these would meet the end where they connect
        channel.store_get(f"waits {other}", WAIT_S)
    _say("ready")
    channel.send(Failed(rank=RANK, error="ValueError: x", traceback=""))
    os._exit(7)


def heeds(folder: Path) -> None:
    """Ends well when it is signalled, with a last file."""

    def end(number: int, frame: object) -> None:
        (folder / f"saved-{RANK}").write_text(signal.Signals(number).name)
        sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    channel = _connected()
    channel.store_set(heeds_key(RANK), b"1")
    channel.store_get(heeds_key(RANK), WAIT_S)
    _say("ready")
    while True:
        signal.pause()


def apart(folder: Path) -> None:
    """Has nothing to do with the coordinator."""
    _say("ready")
    while True:
        signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
