"""Messages through memory that two ranks map."""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.comm.transport.shared_memory import may_share_memory
from elche.errors import CommunicationError, DeadlineError
from elche.pipeline.peers import transport
from elche.pipeline.peers.memory_lines import (
    SLOTS,
    IncomingMemory,
    Letter,
    MemoryLines,
    OutgoingMemory,
)
from elche.pipeline.peers.stage_messages import NO_STEP_TAGS, Message
from elche.pipeline.peers.transport import Address, Transport
from elche.runtime.process.coordinator import serve_in_thread
from tests.harness.rank_pool import RankPool
from tests.pipeline.cases.memory_line_cases import piped_by
from tests.pipeline.cases.pipeline_cases import Work, furthest, plain
from tests.pipeline.step.thread_link import transports

pytestmark = pytest.mark.skipif(
    not may_share_memory(), reason="no memory without a name on this machine"
)

TENSORS = (
    torch.randn(3, 4)[:, ::2],
    torch.randn(2, 2, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.tensor(7, dtype=torch.int16),
    torch.empty(0, 3),
    torch.randn(5, dtype=torch.bfloat16, requires_grad=True),
    torch.tensor([1 + 2j]).conj().imag,
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
        sender.send(5, Letter(Message(TENSORS, ["t"], (False,) * len(TENSORS))))
        receiver.poll()
        found = receiver.take(5)
    assert found.structure == ["t"]
    for one, other in zip(found.tensors, TENSORS, strict=True):
        assert torch.equal(one, other.resolve_conj().resolve_neg())
        assert one.dtype == other.dtype
        assert not one.requires_grad


def test_a_whole_state_does_not_stay_in_memory_and_messages_of_steps_find_theirs() -> (
    None
):
    state = torch.randn(1 << 20)
    with way() as (sender, receiver):

        def send(tag: int, tensor: torch.Tensor) -> int:
            sender.send(tag, Letter(Message((tensor,))))
            receiver.poll()
            assert torch.equal(receiver.take(tag).tensors[0], tensor)
            return os.fstat(sender.offer[2]).st_blocks * 512

        for _ in range(2 * SLOTS):
            assert send(NO_STEP_TAGS, state) < state.nbytes / 8
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
            st.tuples(st.sampled_from(["poll", "take"]), st.integers(0, 3), st.just(0)),
        ),
        max_size=60,
    )
)
def test_messages_come_in_order_and_no_slot_is_written_twice(
    moves: list[tuple[str, int, int]],
) -> None:
    sent: dict[int, deque[torch.Tensor]] = defaultdict(deque)
    pending = 0
    with way() as (sender, receiver):
        for number, (move, tag, numel) in enumerate(moves):
            if move == "send":
                letter = Letter(Message((torch.full((numel,), float(number)),)))
                if sender.has_room(letter):
                    sender.send(tag, letter)
                    sent[tag].append(letter.tensors[0])
                    pending += 1
                else:
                    assert pending == SLOTS or (pending and numel > 10_000)
            else:
                receiver.poll()
                pending = 0
            if move == "take" and sent[tag]:
                assert receiver.has(tag)
                expected = sent[tag].popleft()
                assert torch.equal(receiver.take(tag).tensors[0], expected)
            assert sender.pending == pending
        receiver.poll()
        assert receiver.untaken == sum(map(len, sent.values()))


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


@contextmanager
def two() -> Iterator[list[Transport]]:
    """Two ranks in one process, connected by memory."""
    made: list[Any] = transports(2)
    meeting, told = threading.Barrier(2), [[], []]

    def open_one(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            meeting.wait(60)
            told[rank] = value
            meeting.wait(60)
            return list(told)

        made[rank].memory = MemoryLines.open(rank, 2, exchange)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    try:
        yield made
    finally:
        for each in made:
            each.close()


def test_ranks_that_fill_each_others_slots_both_go_on() -> None:
    count, before = 3 * SLOTS, set(threading.enumerate())
    with two() as made:
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

        threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert found == [[float(n) for n in reversed(range(count))]] * 2
        assert set(threading.enumerate()) <= before, "nothing carries them"
        assert [one.untaken for one in made] == [0, 0]


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


def test_what_does_not_come_has_a_deadline_and_a_closed_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "REASON_WITHIN_S", 0.0)  # there is none
    with two() as (first, second):
        address = Address(1, 3, "the gradient")
        with pytest.raises(DeadlineError, match="for rank 1: the gradient; nobody"):
            first.receive(address, 0.2)
        second.close()
        with pytest.raises(CommunicationError, match="it has closed its end"):
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
