"""Real sockets on loopback: honest ranks, strangers, deadlines."""

from __future__ import annotations

import gc
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from elche.comm.control.control_channel import ControlChannel
from elche.comm.control.frames import (
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    TAG_BYTES,
    FrameCodec,
    nonce_of,
)
from elche.coordination.protocol.events import BarrierReached, Failed, Left
from elche.coordination.protocol.instructions import (
    Abort,
    BarrierPassed,
    GrantBatches,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.protocol.wire import to_wire
from elche.errors import (
    CommunicationError,
    DeadlineError,
    ProtocolError,
    RemoteRankError,
)
from elche.pipeline.peers.waits import Waits
from elche.runtime.process import coordinator
from elche.runtime.process.coordinator import CoordinatorServer
from elche.sim.cluster import Cluster, Device, SimulatedRun
from elche.sim.rank import join_of
from tests.harness.serving import serve_in_thread

KEY = b"k" * 32
WAIT_S = 60.0
PAIR = Cluster(
    run=SimulatedRun(samples=160, batch_size=8, policy="sync"),
    devices=(Device(seconds_per_sample=0.01, count=2),),
)


def nested(depth: int) -> object:
    """Lists in lists, deeper than what prints them may go."""
    value: object = None
    for _ in range(depth):
        value = [value]
    return value


class Served:
    """A coordinator in a thread, and how to reach it."""

    def __init__(self, environment: dict[str, str], server: CoordinatorServer) -> None:
        host, _, port = environment["ELCHE_COORDINATOR"].rpartition(":")
        self.address = host, int(port)
        self.key = bytes.fromhex(environment["ELCHE_KEY"])
        self.server = server

    def channel(self, rank: int) -> ControlChannel:
        return ControlChannel.connect(self.address, self.key, rank, WAIT_S)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_S)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    servers = []

    class Watched(CoordinatorServer):
        def __init__(self, world_size: int, key: bytes, **more: bool) -> None:
            super().__init__(world_size, key, **more)
            servers.append(self)

    monkeypatch.setattr(coordinator, "CoordinatorServer", Watched)
    with serve_in_thread(2) as environments:
        yield Served(environments[0], servers[0])


def honest_run(served: Served, between: Callable[[], None]) -> None:
    """Two ranks join, pass a barrier and leave; a stranger acts between."""
    with closing(served.channel(0)) as first, closing(served.channel(1)) as second:
        channels = (first, second)
        for rank, channel in enumerate(channels):
            channel.send(join_of(PAIR, rank, PAIR.devices[0]))
        for channel in channels:
            assert isinstance(channel.receive(WAIT_S, "welcome"), Welcome)
        between()
        for rank, channel in enumerate(channels):
            channel.send(BarrierReached(rank=rank, name="a"))
        for channel in channels:
            assert isinstance(channel.receive(WAIT_S, "barrier"), BarrierPassed)
        for rank, channel in enumerate(channels):
            channel.send(Left(rank=rank))


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = b""
    try:
        while part := connection.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    return received


def hello_of(key: bytes, rank: object) -> Callable[[bytes], bytes]:
    def hello(nonce: bytes) -> bytes:
        codec = FrameCodec(key, nonce, is_server=False)
        return codec.encode({"type": "Hello", "rank": rank})

    return hello


@pytest.mark.parametrize(
    "what", ["garbage", "http", "wrong key", "oversized", 2, -1, 10**6]
)
def test_a_stranger_is_dropped_and_counted_and_disturbs_nobody(
    served: Served, what: str | int
) -> None:
    """Also one with the key and a rank that cannot be: once any number was admitted."""

    def intrude() -> None:
        with served.stranger() as stranger:
            nonce = nonce_of(stranger.recv(GREETING_BYTES, socket.MSG_WAITALL))
            sent: dict[str | int, bytes] = {
                "garbage": bytes(2 * 4 + TAG_BYTES),
                "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
                "wrong key": hello_of(b"j" * 32, 0)(nonce),
                "oversized": struct.pack(">I", 2**31) + bytes(TAG_BYTES),
            }
            stranger.sendall(sent.get(what, hello_of(served.key, what)(nonce)))
            assert read_to_end(stranger) == b""
        assert served.server.drops == 1

    honest_run(served, intrude)
    assert served.server.core.aborted is None


def test_a_rank_that_is_taken_cannot_be_taken_over(served: Served) -> None:
    def intrude() -> None:
        with (
            closing(served.channel(1)) as second,
            pytest.raises(CommunicationError, match="lost the coordinator"),
        ):
            second.receive(WAIT_S, "anything")
        assert served.server.drops == 1

    honest_run(served, intrude)
    assert served.server.core.aborted is None


@pytest.mark.parametrize(
    "message",
    [
        {"type": "StoreSet", "key": "a"},
        {"type": "StoreSet", "key": "a", "value": None},
        {"type": "BarrierReached", "rank": 0, "name": nested(1000)},
    ],
    ids=["no value", "no bytes", "deep"],
)
def test_a_message_that_cannot_be_read_drops_the_connection(
    served: Served, message: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    # Once: KeyError, TypeError, RecursionError leave data_received, logged by asyncio.
    served.server.drops = strangers = 10
    with closing(served.channel(0)) as channel:
        channel._send(message)
        with pytest.raises(CommunicationError, match="lost the coordinator"):
            channel.receive(WAIT_S, "anything")
    assert served.server.drops == strangers + 1
    assert "dropped a connection of rank 0: " in caplog.text
    assert [r for r in caplog.records if r.name == "asyncio"] == []


def test_a_silent_stranger_does_not_outlive_the_server() -> None:
    # Once: only connections that said Hello are closed; asyncio warns of the rest.
    with serve_in_thread(2) as environments:
        host, _, port = environments[0]["ELCHE_COORDINATOR"].rpartition(":")
        stranger = socket.create_connection((host, int(port)), timeout=WAIT_S)
        stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
    with stranger:
        assert read_to_end(stranger) == b""
    gc.collect()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_end_is_told_why_without_asking(
    served: Served, late: int
) -> None:
    failed = Failed(rank=1 - late, error="no data", traceback="at line 3")
    with closing(served.channel(1 - late)) as early:
        early.send(failed)
        assert isinstance(early.receive(WAIT_S, "the reason"), Abort)
    with closing(served.channel(late)) as channel:
        abort = channel.receive(WAIT_S, "the reason")
        assert isinstance(abort, Abort)
        assert abort == Abort(
            rank=late,
            reason=f"rank {1 - late} failed: no data",
            failed_rank=1 - late,
            traceback="at line 3",
        )


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, "18", None])
def test_a_rank_of_another_version_is_refused_for_that_whatever_its_fields_are(
    served: Served, version: object
) -> None:
    wire = to_wire(join_of(PAIR, 1, PAIR.devices[0])) | {"version": version, "new": 1}
    del wire["tensors"]
    with closing(served.channel(0)) as first, closing(served.channel(1)) as second:
        first.send(join_of(PAIR, 0, PAIR.devices[0]))
        second._send(wire)
        for channel in (first, second):
            abort = channel.receive(WAIT_S, "the end")
            assert isinstance(abort, Abort)
            assert abort.reason.startswith("rank 1 uses protocol version ")
            assert "install one elche version everywhere" in abort.reason


def test_values_of_the_rendezvous_come_before_or_after_they_are_asked_for(
    served: Served,
) -> None:
    with closing(served.channel(0)) as first, closing(served.channel(1)) as second:
        first.store_set("a", b"early")
        assert second.store_get("a", WAIT_S) == b"early"
        got: list[bytes] = []
        waiter = threading.Thread(
            target=lambda: got.append(second.store_get("b", WAIT_S))
        )
        waiter.start()
        first.store_set("b", b"late")
        waiter.join(WAIT_S)
        assert got == [b"late"]


@pytest.mark.parametrize("wait", ["receive", "store_get"])
def test_a_wait_ends_at_its_deadline_and_names_what_for(
    served: Served, wait: str
) -> None:
    with closing(served.channel(0)) as channel:
        began_s = time.monotonic()
        waits = {
            "receive": lambda: channel.receive(0.2, "the moon"),
            "store_get": lambda: channel.store_get("the moon", 0.2),
        }
        with pytest.raises(DeadlineError, match=r"rank 0 waited 0.2 s for .*the moon"):
            waits[wait]()
        assert time.monotonic() - began_s >= 0.2
        channel.wait_readable(0.05)
        assert next(channel.ready(), None) is None


def test_a_deadline_of_months_is_waited_for(served: Served) -> None:
    # Once: OverflowError, as a poll takes at most 2**31 milliseconds.
    with closing(served.channel(0)) as channel, closing(served.channel(1)) as other:
        other.send(Failed(rank=1, error="ValueError: x", traceback=""))
        assert isinstance(channel.receive(1e7, "the end"), Abort)


@contextmanager
def one_connection() -> Iterator[tuple[ControlChannel, socket.socket, FrameCodec]]:
    """A channel and the raw socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []
        nonce = b"n" * NONCE_BYTES

        def accept() -> None:
            connection, _ = listener.accept()
            connection.sendall(MAGIC + nonce)
            accepted.append(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        channel = ControlChannel.connect(listener.getsockname(), KEY, 0, WAIT_S)
        thread.join(WAIT_S)
        codec = FrameCodec(KEY, nonce, is_server=True)
        with closing(channel), accepted[0]:
            yield channel, accepted[0], codec


ABORT = Abort(rank=0, reason="rank 1 failed: ValueError: x", failed_rank=1)


@pytest.mark.parametrize("how", ["receive", "poll"])
def test_the_last_word_is_heard_although_the_coordinator_has_gone(how: str) -> None:
    # Once: the end of the stream is raised before what came ahead of it is handed
    # out; the reason of an abort is lost when the launcher ends right after it.
    with one_connection() as (channel, far, codec):
        far.sendall(codec.encode(to_wire(ABORT)))
        far.shutdown(socket.SHUT_WR)
        if how == "receive":
            assert channel.receive(WAIT_S, "anything") == ABORT
        else:
            channel.wait_readable(WAIT_S)
            assert next(channel.ready()) == ABORT
        with pytest.raises(CommunicationError, match="lost the coordinator"):
            channel.receive(WAIT_S, "anything")


def test_the_last_word_is_heard_although_nonsense_came_with_it() -> None:
    # Once: what had come in the same piece as the bad frame was lost.
    with one_connection() as (channel, far, codec):
        stranger = FrameCodec(b"j" * 32, b"n" * NONCE_BYTES, is_server=True)
        nonsense = stranger.encode(to_wire(ABORT))
        far.sendall(codec.encode(to_wire(ABORT)) + nonsense)
        assert channel.receive(WAIT_S, "anything") == ABORT
        for _ in range(2):
            with pytest.raises(ProtocolError, match="not authentic"):
                channel.receive(WAIT_S, "anything")
        channel.send(Left(rank=0))  # this direction is whole


def test_the_end_is_seen_although_work_is_in_line() -> None:
    # Once: None for ever, and a rank waited its deadline out for ranks that were gone.
    grant = GrantBatches(rank=0, epoch=0, start=5, stop=6, shares=(1, 1))
    with one_connection() as (channel, far, codec):
        far.sendall(codec.encode(to_wire(grant)))
        channel.wait_readable(WAIT_S)
        assert channel.find_abort() is None
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(CommunicationError, match="lost the coordinator"):
            poll_for_abort(channel)
        assert channel.receive(WAIT_S, "the grant") == grant


def poll_for_abort(channel: ControlChannel) -> Abort:
    """Looks for an order to end as a rank does while it waits for others."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        abort = channel.find_abort()
        if abort is not None:
            return abort
    raise AssertionError("neither an order to end nor the end of the connection")


def test_what_could_not_be_sent_is_raised_when_the_last_word_is_read() -> None:
    # Once: passed over for good, as something had come that was not read yet; and the
    # part of it that had gone out made nonsense of what was sent next.
    with one_connection() as (channel, far, codec):
        channel._timeout_s = 0.05
        far.sendall(codec.encode(to_wire(ABORT)))
        channel.wait_readable(WAIT_S)
        channel.store_set("large", bytes(32 << 20))
        channel.send(Left(rank=0))
        assert channel.find_abort() == ABORT
        assert channel.receive(WAIT_S, "anything") == ABORT
        why = r"lost the coordinator: timed out \(StoreSet was not sent\)"
        for wait in (
            lambda: channel.receive(WAIT_S, "anything"),
            lambda: next(channel.ready(), None),
            lambda: channel.send(Left(rank=0)),
        ):
            with pytest.raises(CommunicationError, match=why):
                wait()


def test_a_wait_for_a_value_ends_with_the_connection() -> None:
    # Once: with something unread, it went round and round until its deadline.
    with one_connection() as (channel, far, codec):
        far.sendall(codec.encode(to_wire(ABORT)))
        far.shutdown(socket.SHUT_WR)
        channel.wait_readable(WAIT_S)
        with pytest.raises(CommunicationError, match="lost the coordinator") as caught:
            channel.store_get("a", WAIT_S)
        assert not isinstance(caught.value, DeadlineError)
        assert channel.store_published(["a"], WAIT_S) == set()
        with pytest.raises(RemoteRankError, match="rank 1 failed"):
            Waits(channel, 0, "").store_get("a", WAIT_S)


def test_a_wait_for_a_value_ends_with_the_run() -> None:
    # Once: a rank waited for its deadline, as the other had failed before its call.
    with one_connection() as (channel, far, codec):
        far.sendall(codec.encode(to_wire(ABORT)))
        with pytest.raises(CommunicationError, match="the run was ended") as caught:
            channel.store_get("a", WAIT_S)
        assert not isinstance(caught.value, DeadlineError)
        assert channel.find_abort() == ABORT


def test_what_a_rank_said_before_nonsense_is_heard(served: Served) -> None:
    # Once: its farewell was lost with the bad frame, and it counted as lost.
    with closing(served.channel(0)) as channel:
        stranger = FrameCodec(b"j" * 32, b"n" * NONCE_BYTES, is_server=False)
        failed = to_wire(Failed(rank=0, error="ValueError: x", traceback=""))
        channel._put(channel._codec.encode(failed) + stranger.encode(failed))
        abort = channel.receive(WAIT_S, "the end")
        assert isinstance(abort, Abort)
        assert "ValueError: x" in abort.reason


def test_what_the_system_takes_in_parts_arrives_whole() -> None:
    value = bytes(range(256)) * (1 << 15)
    read: list[bytes] = []
    with one_connection() as (channel, far, _):
        far.settimeout(WAIT_S)
        reader = threading.Thread(target=lambda: read.append(read_to_end(far)))
        channel.store_set("small", b"1")
        assert channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 8 << 20
        reader.start()
        channel.store_set("large", value)
        channel.store_set("last", b"2")
        channel.close()
        reader.join(WAIT_S)
    codec = FrameCodec(KEY, b"n" * NONCE_BYTES, is_server=True)
    said = list(codec.feed(read[0]))
    assert [message.get("value") for message in said] == [None, b"1", value, b"2"]


def test_a_new_connection_brings_what_the_last_one_left_open() -> None:
    """Messages that were not acknowledged, and requests for values, each once."""
    pairs = [socket.socketpair() for _ in range(2)]
    nonces = [bytes([number]) * NONCE_BYTES for number in range(2)]
    near = [FrameCodec(KEY, nonce, is_server=False) for nonce in nonces]
    far = [FrameCodec(KEY, nonce, is_server=True) for nonce in nonces]
    for one, _ in pairs:
        one.settimeout(WAIT_S)
    (first, lost), (second, new) = pairs
    channel = ControlChannel(first, near[0], 0, lambda: (second, near[1]))
    for key in ("x", "y"):
        channel.store_set(key, b"1")
        channel.store_ask(f"of {key}")
    answer = {"type": "StoreValue", "key": "of x", "value": b"2"}
    with lost:
        lost.recv(1 << 16)
        lost.sendall(far[0].encode(answer))
    new.sendall(far[1].encode({"type": "Resumed", "taken": 1}))
    for _ in range(2):  # the value, and the end
        channel.wait_for_values(WAIT_S)
    with closing(second), new:
        new.settimeout(1.0)
        came: list[dict[str, object]] = []
        while len(came) < 3:
            came += far[1].feed(new.recv(1 << 16))
    assert [one["type"] for one in came] == ["Hello", "StoreSet", "StoreGet"]
    assert (came[1]["key"], came[2]["key"]) == ("y", "of y")


@pytest.mark.parametrize("value", [2**40, True, None, "text", [1, 2], {"a": 1}])
def test_a_value_of_the_rendezvous_that_is_no_bytes_is_refused(value: object) -> None:
    # Once: a number made as many zeros, anything else a TypeError.
    with one_connection() as (channel, far, codec):
        far.sendall(codec.encode({"type": "StoreValue", "key": "a", "value": value}))
        with pytest.raises(ProtocolError, match="expected StoreValue with a key and"):
            channel.store_get("a", WAIT_S)


def test_a_closed_channel_says_so() -> None:
    with one_connection() as (channel, _, _):
        channel.close()
        channel.close()
        channel.send(Left(rank=0))
        with pytest.raises(CommunicationError, match="closed"):
            channel.receive(WAIT_S, "anything")


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_whoever_else_listens_there_is_no_coordinator(greeting: bytes) -> None:
    # Once: the socket is not closed on the way out (ResourceWarning).
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CommunicationError, match=r"rank 3 cannot reach.*elche run"):
            ControlChannel.connect(listener.getsockname(), KEY, 3, WAIT_S)
        thread.join(WAIT_S)
    gc.collect()
