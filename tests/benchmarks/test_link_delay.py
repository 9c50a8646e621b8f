"""The switch that delays: where frames go, and when."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from benchmarks.links.delay import OFFLOAD_BYTES, Switch

DELAY_S = 0.02
EVERYBODY = b"\xff" * 6


def frame(receiver: bytes, sender: bytes, payload: bytes) -> bytes:
    return b"\0" * OFFLOAD_BYTES + receiver + sender + payload


class Cables:
    """A switch of three ports, and what hangs on them: a, b and c."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(3)]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
            end.setblocking(False)
        self.ports = [port for port, _ in pairs]
        self.ends = dict(zip("abc", (end for _, end in pairs), strict=True))
        self.switch = Switch(self.ports, DELAY_S)

    def send(self, sender: str, receiver: bytes, payload: bytes, now_s: float) -> None:
        address = sender.encode() * 6
        self.ends[sender].send(frame(receiver, address, payload))
        self.switch.take(self.ports["abc".index(sender)], now_s)

    def received(self, name: str) -> list[bytes]:
        """Payloads that have come."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.ends[name].recv(100)[OFFLOAD_BYTES + 12 :])
        return found


@pytest.fixture
def cables() -> Iterator[Cables]:
    with contextlib.ExitStack() as stack:
        yield Cables(stack)


def test_a_frame_comes_after_the_delay_and_not_before(cables: Cables) -> None:
    assert cables.switch.pass_on(0.0) is None
    cables.send("a", EVERYBODY, b"who is b", 1.0)
    cables.send("a", EVERYBODY, b"again", 1.005)
    assert cables.switch.pass_on(1.0) == pytest.approx(DELAY_S)
    assert cables.received("b") == []
    assert cables.switch.pass_on(1.0 + DELAY_S) == pytest.approx(0.005)
    assert cables.received("b") == cables.received("c") == [b"who is b"]
    assert cables.switch.pass_on(2.0) is None
    assert cables.received("b") == [b"again"]
    assert cables.received("a") == []


def test_a_known_address_gets_its_frames_alone_and_in_order(cables: Cables) -> None:
    cables.send("b", EVERYBODY, b"here", 0.0)
    cables.switch.pass_on(1.0)
    for number in range(5):
        cables.send("a", b"b" * 6, bytes([number]), 1.0)
    cables.switch.pass_on(2.0)
    assert cables.received("b") == [bytes([number]) for number in range(5)]
    assert cables.received("c") == [b"here"]


def test_a_frame_for_its_own_port_goes_nowhere(cables: Cables) -> None:
    cables.send("a", b"a" * 6, b"echo", 0.0)
    cables.switch.pass_on(1.0)
    assert [cables.received(name) for name in "abc"] == [[], [], []]


def test_a_port_that_is_gone_holds_nobody_up(cables: Cables) -> None:
    cables.ends["b"].close()
    cables.send("a", EVERYBODY, b"who", 0.0)
    cables.switch.pass_on(1.0)
    assert cables.received("c") == [b"who"]
