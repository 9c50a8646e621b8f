"""A coordinator that stands by, and ranks that go on with it when the other is lost."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.control.addresses import reserve
from elche.comm.control.control_channel import ControlChannel
from elche.coordination.journal import Entry, RunRecord
from elche.coordination.protocol.inputs import StoreSet, StreamBegun
from elche.coordination.protocol.instructions import BarrierPassed, Welcome
from elche.coordination.protocol.wire import FROM_JOURNAL
from elche.errors import CommunicationError, DeadlineError, ProtocolError
from elche.runtime.coordinator_process import kept_coordinator
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.coordinator_process.pieces import pack_piece, replay_piece
from elche.runtime.coordinator_process.write_gate import WriteGate
from elche.sim.rank import join_of
from tests.coordination.protocol.test_messages import messages_of
from tests.runtime.coordinator_process.test_kept_coordinator import (
    PAIR,
    WAIT_S,
    Launcher,
    both,
    until,
)

ROUNDS, LOST_AT = 700, 500
"""So many that a copy takes the place of pieces on either side."""


class TwoLaunchers(Launcher):
    """The coordinator's, and that of one which stands by and has each piece at once.

    Attributes:
        is_cut: that one has no more of them.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self.channels: dict[int, ControlChannel] = {}
        self.mover: threading.Thread | None = None
        super().__init__()

    async def _start(self) -> KeptCoordinator:
        self.standby = KeptCoordinator(
            2, self.key, survives=True, listener=reserve("127.0.0.1"), stands_by=True
        )
        self.standby.start()
        kept = KeptCoordinator(2, self.key, survives=True)
        kept.on_piece = partial(self._spread, kept)
        kept.start()
        kept.hold(lambda: None)
        return kept

    def _spread(
        self, kept: KeptCoordinator, data: bytes, number: int, commands: int
    ) -> None:
        if not self.is_cut:
            self.standby.follow(data, number, commands)
            kept.written(number)

    def channel(self, rank: int) -> ControlChannel:
        made = self.channels[rank] = ControlChannel.connect(
            *(self.kept.address, self.key, rank, WAIT_S), resumes=True, may_move=True
        )
        return made

    def lose(self) -> None:
        """The one that serves is cut off, takes more that nobody hears of, and dies."""
        self.is_cut = True
        self.mover = threading.Thread(target=self._move)
        self.mover.start()

    def _move(self) -> None:
        until(lambda: self.kept.pieces > self.standby.pieces + 1)
        self.call(self.kept.stop())
        self.loop.call_soon_threadsafe(self.standby.promote, {})
        for channel in self.channels.values():
            channel.move(self.standby.address)


@pytest.mark.parametrize("kills", [0, 2])
def test_ranks_go_on_with_the_one_that_stood_by(kills: int) -> None:
    """No message is lost or taken twice, also where it dies, before or afterwards."""

    def at(rank: int, number: int) -> None:
        if (rank, number) == (0, LOST_AT):
            run.lose()
        if kills and rank == 1 and number in (LOST_AT - 200, LOST_AT + 100):
            run.kill(run.standby)

    run = TwoLaunchers()
    try:
        told = both(run, ROUNDS, at)
        until(lambda: run.standby.status.is_finished)
        assert run.kills == kills
        story = run.call(run.standby.stop(wants_story=True))
    finally:
        run.call(run.standby.stop())
        run.call(run.kept.stop())
        run.loop.call_soon_threadsafe(run.loop.stop)
        run.thread.join(WAIT_S)
        run.loop.close()
    assert run.mover is not None
    run.mover.join(WAIT_S)
    assert run.kept.pieces > LOST_AT
    assert told == [[str(number) for number in range(ROUNDS)]] * 2
    said = [line.partition(" ")[2] for line in story if "Barrier" in line]
    assert len(said) == len({*said})
    least = ROUNDS if kills else 4 * ROUNDS  # a copy has the end of the story alone
    assert least <= len(said) <= 4 * ROUNDS


def two_launchers(stack: ExitStack) -> TwoLaunchers:
    """Both, ended with the stack."""
    run = TwoLaunchers()
    stack.callback(run.loop.close)
    stack.callback(run.thread.join, WAIT_S)
    stack.callback(run.loop.call_soon_threadsafe, run.loop.stop)
    for each in (run.standby, run.kept):
        stack.callback(lambda each: run.call(each.stop()), each)
    return run


def test_nobody_is_told_what_is_not_written() -> None:
    with ExitStack() as stack:
        run = two_launchers(stack)
        run.is_cut = True
        channels = [stack.enter_context(closing(run.channel(r))) for r in (0, 1)]
        for rank, channel in enumerate(channels):
            channel.send(join_of(PAIR, rank, PAIR.devices[0]))
        until(lambda: len(run.kept.status.devices) == 2)  # both joins are taken
        with pytest.raises(DeadlineError, match=r"rank 0 waited 0\.5 s for"):
            channels[0].receive(0.5, "a welcome")
        run.loop.call_soon_threadsafe(run.kept.written, run.kept.pieces)
        for channel in channels:
            assert isinstance(channel.receive(WAIT_S, "a welcome"), Welcome)
        run.loop.call_soon_threadsafe(run.kept.release)
        channels[0].store_set("a", b"b")
        assert channels[1].store_get("a", WAIT_S) == b"b"


def test_a_rank_whose_coordinator_may_move_waits_for_its_launchers_word() -> None:
    with ThreadPoolExecutor(1) as ranks:
        run = TwoLaunchers()
        channel = run.channel(0)
        run.call(run.kept.stop())
        waiting = ranks.submit(channel.receive, WAIT_S, "anything")
        with pytest.raises(TimeoutError, match=r"^$"):
            waiting.result(0.5)  # whose listener refuses it meanwhile
        run.call(run.standby.stop())
        channel.move(run.standby.address)
        channel._reconnect._may_move = False  # type: ignore[union-attr]
        with pytest.raises(CommunicationError, match="rank 0 lost the coordinator"):
            waiting.result(WAIT_S)
        channel.close()
        run.loop.call_soon_threadsafe(run.loop.stop)
        run.thread.join(WAIT_S)
        run.loop.close()


@given(
    steps=st.lists(st.sampled_from(["piece", "act", "written", "open"]), max_size=30),
    holds=st.booleans(),
)
def test_what_follows_from_a_piece_waits_for_it_in_order(
    steps: list[str], holds: bool
) -> None:
    gate, done, asked, written = WriteGate(), list[tuple[int, int]](), 0, 0
    gate.holds = holds
    for step in steps:
        if step == "piece":
            gate.pieces += 1
        elif step == "act":
            gate.act(partial(done.append, (asked, gate.pieces)))
            asked += 1
        elif step == "written":
            written = min(written + 1, gate.pieces)
            gate.written(written)
        else:
            gate.open()
        assert [number for number, _ in done] == [*range(len(done))]
        if gate.holds:
            assert all(pieces <= written for _, pieces in done)
        else:
            assert len(done) == asked


KINDS = sorted(FROM_JOURNAL.values(), key=lambda kind: kind.__name__)


@given(
    what=st.sampled_from(KINDS).flatmap(messages_of),
    source=st.none() | st.integers(-1, 9),
    now_s=st.floats(0.0, 1e9),
)
def test_entries_come_as_they_were_taken(
    what: object, source: int | None, now_s: float
) -> None:
    entry = Entry(source, what, now_s)  # type: ignore[arg-type]
    record, found = RunRecord(1, survives=True), list[Entry]()
    record.replay = found.extend  # type: ignore[method-assign]
    replay_piece(record, pack_piece([entry], record))
    assert found == [entry]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgpack.packb(([(1, 2)], [])), msgpack.packb([[], 1])]
)
def test_what_is_no_piece_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a piece of the journal is none"):
        replay_piece(RunRecord(1, survives=True), data)


def test_instructions_that_ranks_have_are_not_kept_by_who_stands_by() -> None:
    first, second = (RunRecord(1, survives=True) for _ in range(2))
    begun = Entry(None, StreamBegun(0, "a"), 1.0)
    first.apply(begun)
    replay_piece(second, pack_piece([begun], first))
    for record in (first, second):
        record.streams[0].told.add(*[BarrierPassed(rank=0, name="")] * 5)
    first.streams[0].told.acknowledge(4)
    replay_piece(second, pack_piece([], first, says_told=True))
    assert len(second.streams[0].told.rest()) == 1


def piece_of(number: int) -> bytes:
    """A large one, of which each takes the place of the last."""
    entry = Entry(None, StoreSet("number", bytes([number]) * (1 << 18)), 1.0)
    return pack_piece([entry], RunRecord(2, survives=True))


@pytest.mark.parametrize("most", [kept_coordinator.MOST_DEATHS, 1])
def test_for_one_that_is_stopped_while_it_stands_by_nothing_piles_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    """Another one takes its place, and stands where that would; or it is given up."""
    monkeypatch.setattr(kept_coordinator, "BEHIND_BYTES", 1 << 20)
    monkeypatch.setattr(kept_coordinator, "MOST_DEATHS", most)

    async def follow(number: int) -> None:
        run.standby.follow(piece_of(number), number, 0)

    with ExitStack() as stack:
        run = two_launchers(stack)
        until(lambda: run.standby.pid is not None)
        stopped = run.standby.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        number = 0
        while "has not read" not in caplog.text:
            number += 1
            assert number < 30
            run.call(follow(number))
        if most == 1:
            until(lambda: run.standby.aborted is not None)
            run.call(follow(number + 1))
            assert not run.standby._journal
            assert "in a row: this host can lead no more" in caplog.text
            return
        until(lambda: run.standby.pid not in (None, stopped))
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(stopped, 0)
        channel = stack.enter_context(closing(run.channel(0)))
        run.call(run.kept.stop())
        run.loop.call_soon_threadsafe(run.standby.promote, {})
        channel.move(run.standby.address)
        assert channel.store_get("number", WAIT_S)[0] == number
