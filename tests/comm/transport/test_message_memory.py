"""Messages through memory that two ranks map."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.comm.transport.gloo_lines import Inbox
from elche.comm.transport.message_memory import (
    SLOTS,
    IncomingMemory,
    OutgoingMemory,
    open_message_memory,
)
from elche.comm.transport.messages import BETWEEN_STEPS, Address, Message, Packed
from elche.comm.transport.point_to_point import PointToPoint
from elche.comm.transport.shared_memory import may_share_memory
from elche.errors import CommunicationError, DeadlineError
from tests.comm.transport.thread_link import TENSORS, check_whole, transports, untaken
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.message_memory_cases import piped_by
from tests.pipeline.cases.pipeline_cases import Work, furthest, plain

pytestmark = pytest.mark.skipif(
    not may_share_memory(), reason="no memory without a name on this machine"
)


@contextmanager
def way() -> Iterator[tuple[OutgoingMemory, IncomingMemory]]:
    """Both ends, in one process."""
    sender = OutgoingMemory()
    receiver = IncomingMemory.open(sender.offer)
    assert receiver is not None
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def test_every_kind_of_tensor_comes_whole() -> None:
    with way() as (sender, receiver):
        assert sender.send(5, Packed(Message(TENSORS, ["t"])))
        ((tag, found),) = receiver.read()
    assert tag == 5
    check_whole(found)


def test_a_whole_state_does_not_stay_in_memory_and_messages_of_steps_find_theirs() -> (
    None
):
    state = torch.randn(1 << 20)
    with way() as (sender, receiver):

        def send(tag: int, tensor: torch.Tensor) -> int:
            assert sender.send(tag, Packed(Message((tensor,))))
            ((_, found),) = receiver.read()
            assert torch.equal(found.tensors[0], tensor)
            return os.fstat(sender.offer[2]).st_blocks * 512

        for _ in range(2 * SLOTS):
            assert send(BETWEEN_STEPS, state) < state.nbytes / 8
            assert send(5, state[: 1 << 10]) < state.nbytes / 8
        assert send(5, state) >= state.nbytes  # as the next one is of that size


@settings(deadline=None, max_examples=60)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(
                st.just("send"),
                st.integers(0, 3),
                # Beyond a slot's first size, too.
                st.sampled_from([0, 1, 100, 30_000, 100_000]),
            ),
            st.tuples(st.just("read"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_messages_come_in_order_and_no_slot_is_written_twice(
    moves: list[tuple[str, int, int]],
) -> None:
    sent: list[tuple[int, torch.Tensor]] = []
    with way() as (sender, receiver):

        def read() -> None:
            found = list(receiver.read())
            assert [tag for tag, _ in found] == [tag for tag, _ in sent]
            for (_, message), (_, expected) in zip(found, sent, strict=True):
                assert torch.equal(message.tensors[0], expected)
            sent.clear()

        for number, (move, tag, numel) in enumerate(moves):
            if move == "read":
                read()
            else:
                tensor = torch.full((numel,), float(number))
                if sender.send(tag, Packed(Message((tensor,)))):
                    sent.append((tag, tensor))
                else:
                    assert len(sent) == SLOTS or (sent and numel > 10_000)
            assert sender.pending == len(sent)
        read()


def test_memory_of_another_host_or_process_is_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender = OutgoingMemory()
    host, pid, descriptor, token = sender.offer
    assert IncomingMemory.open([host, pid, descriptor, token + 1]) is None
    assert IncomingMemory.open([host, 2**22 + 1, descriptor, token]) is None
    monkeypatch.setenv("ELCHE_HOST", "another")
    assert IncomingMemory.open(sender.offer) is None
    sender.close()


def at_once(run: Callable[[int], None]) -> None:
    """On both ranks, each a thread."""
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(2), timeout=60)] == [None, None]


@contextmanager
def two(by_memory: bool = True) -> Iterator[list[PointToPoint]]:
    """Two ranks in one process, connected by memory or in gloo's way."""
    made: list[PointToPoint] = transports(2, is_connected=False)
    meeting, told = threading.Barrier(2), ["", ""]

    def open_one(rank: int) -> None:
        def exchange(text: str) -> list[str]:
            meeting.wait(60)
            told[rank] = text
            meeting.wait(60)
            return list(told)

        made[rank].connect(open_message_memory(rank, 2, exchange) if by_memory else {})

    at_once(open_one)
    try:
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("by_memory", [True, False])
def test_ranks_that_fill_each_others_slots_both_go_on(by_memory: bool) -> None:
    count, before = 3 * SLOTS, set(threading.enumerate())
    with two(by_memory) as made:
        found: list[list[float]] = [[], []]

        def talk(rank: int) -> None:
            other = 1 - rank
            for number in range(count):
                value = torch.full((50_000,), float(number))
                made[rank].send(Address(other, number, "x"), Message((value,)), 60.0)
            for number in reversed(range(count)):
                message = made[rank].receive(Address(other, number, "x"), 60.0)
                found[rank].append(float(message.tensors[0][-1]))
            made[rank].flush(60.0)

        at_once(talk)
        assert found == [[float(n) for n in reversed(range(count))]] * 2
        if by_memory:
            assert set(threading.enumerate()) <= before, "no thread carries them"
        assert [untaken(one) for one in made] == [0, 0]


def test_of_messages_with_one_tag_the_oldest_is_taken() -> None:
    inbox, sent = Inbox(), [Message((torch.ones(n),)) for n in range(3)]
    for tag, message in zip((1, 2, 1), sent, strict=True):
        inbox.append((tag, message))
    assert [inbox.take(tag) for tag in (1, 1, 2)] == [sent[0], sent[2], sent[1]]
    assert not inbox.has(1)


@pytest.mark.parametrize("by_memory", [True, False])
def test_a_rank_that_does_not_wait_holds_few_messages(by_memory: bool) -> None:
    """As many as there are slots; its sender may have as many under way."""
    with two(by_memory) as (first, second):
        sent = SLOTS if by_memory else 2 * SLOTS
        message = Message((torch.ones(1),))
        for number in range(sent):
            first.send(Address(1, number, "the next"), message, 60.0)
        with pytest.raises(DeadlineError, match=r"for \[1\]: room to send another"):
            first.send(Address(1, sent, "another"), message, 0.3)
        for number in reversed(range(sent)):
            second.receive(Address(0, number, "the next"), 60.0)
        first.flush(60.0)


def test_closed_ends_hold_no_memory_and_no_descriptor() -> None:
    def held() -> int:
        links = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
        return sum("memfd:elche" in os.readlink(one) for one in links if _is_link(one))

    before = held()
    with two() as made:
        assert held() == before + 8  # of four ends, and of what each has mapped
        for each in made:
            each.close()
        assert held() == before


def _is_link(path: str) -> bool:
    return Path(path).is_symlink()  # not that of the listing itself, which is closed


@pytest.mark.parametrize(
    ("by_memory", "reason"),
    [(True, "it has closed its end"), (False, "Connection closed by peer")],
)
def test_what_does_not_come_has_a_deadline_and_a_closed_end_is_told(
    by_memory: bool, reason: str
) -> None:
    with two(by_memory) as (first, second):
        address = Address(1, 3, "the gradient")
        with pytest.raises(DeadlineError, match=r"for \[1\]: the gradient"):
            first.receive(address, 0.2)
        second.close()
        with pytest.raises(CommunicationError, match=reason):
            first.receive(address, 60.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hosts", "by_memory"),
    [("aabb", [1, 1, 1, 1]), ("aaaa", [3, 3, 3, 3]), ("abcd", [0, 0, 0, 0])],
)
def test_ranks_of_one_host_take_it_and_train_as_one_process(
    ranks4: RankPool, hosts: str, by_memory: list[int]
) -> None:
    work = Work(model="gpt", schedule="zb-v")
    expected = plain(work)
    env = [{"ELCHE_HOST": host} for host in hosts]
    found = ranks4.run(piped_by, work, case_setup=serve_in_thread, env=env)
    assert [ways for _, ways, _ in found] == by_memory
    assert [sent for _, _, sent in found] == [bool(ways) for ways in by_memory]
    assert furthest(found[0][0].state, expected.state) <= 1e-12
    for trained, _, _ in found:
        assert trained.losses == pytest.approx(expected.losses, rel=1e-12)
