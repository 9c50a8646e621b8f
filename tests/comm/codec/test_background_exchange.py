"""An exchange driven beside the training thread is the exchange it drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.codec.background_exchange import BackgroundExchange, SumReader
from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_thread import BackgroundTask
from elche.comm.codec.coded_exchange import CodedExchange
from elche.errors import CommunicationError, ProtocolError
from tests.comm.peers import Peer, Wire, exchanges, message, same_state, summed

NUMEL = 301


class Told:
    """A driver that only hears of it: the test says when the other thread runs."""

    def __init__(self) -> None:
        self.times = 0

    def serve(self, driven: BackgroundTask) -> None:
        self.times += 1


class Talkative(Peer):
    """A rank whose group can say why something failed."""

    broken = False
    asked = 0

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        if self.broken:
            raise CommunicationError(f"send between ranks {self.rank} and {to} failed")
        return super().send_async(memory, to, tag)

    def explained(self, error: CommunicationError) -> Exception:
        self.asked += 1
        return CommunicationError(f"rank 7 is gone; {error}")


def driven(
    world_size: int, codec: str = "int4", numel: int = NUMEL, sums: int = 0
) -> tuple[Wire, list[BackgroundExchange]]:
    wire, ends = exchanges(world_size, CODECS[codec], numel)
    memory = [[torch.zeros(numel) for _ in range(sums)] for _ in ends]
    pairs = zip(ends, memory, strict=True)
    return wire, [BackgroundExchange(end, Told(), own) for end, own in pairs]


def talkative(codec: str = "int8") -> tuple[Talkative, BackgroundExchange]:
    peer = Talkative(Wire(2), 0)
    return peer, BackgroundExchange(CodedExchange(peer, CODECS[codec], 11), Told())


def always() -> bool:
    """All other sums of the reduction are there."""
    return True


def whole(read: SumReader) -> torch.Tensor:
    """A sum that is read at once."""
    found = torch.empty(NUMEL)
    read(0, NUMEL, found)
    return found


def begun(ends: Sequence[BackgroundExchange], seed: int = 10, side: int = 0) -> None:
    for rank, end in enumerate(ends):
        end.settle()
        end.contribution(side).copy_(message(seed + rank, NUMEL - 1))
        end.begin(side)


def drive(ends: Sequence[BackgroundExchange]) -> None:
    """The other thread of every rank, until there is nothing to be done."""
    for _ in range(3):
        for end in ends:
            end.drive()
    assert all(end.drive() is None for end in ends)


def known(world_size: int, seeds: Sequence[int]) -> tuple[torch.Tensor, list[Any]]:
    """The last of some sums, and the residuals then, of what is not driven."""
    _, ends = exchanges(world_size, CODECS["int4"], NUMEL)
    for seed in seeds:
        sent = [message(seed + rank, NUMEL - 1) for rank in range(world_size)]
        last = summed(ends, sent)[0]
    return last, [end.state_dict() for end in ends]


@given(
    world_size=st.integers(2, 4),
    codec=st.sampled_from(["bf16", "int8", "int4"]),
    turns=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=3),
    numel=st.sampled_from([2, 34, NUMEL]),
    sums=st.integers(0, 2),
)
def test_whoever_does_the_work_the_bits_are_the_same(
    world_size: int, codec: str, turns: list[list[int]], numel: int, sums: int
) -> None:
    _, ends = driven(world_size, codec, numel, sums)
    _, plain = exchanges(world_size, CODECS[codec], numel)
    for number, turn in enumerate(turns):
        side = number % 2
        sent = [message(8 * number + r, numel - 1) for r in range(world_size)]
        expected = summed(plain, sent)[0]
        for end, each in zip(ends, sent, strict=True):
            end.contribution(side).copy_(each)
            end.begin(side)
        for rank in turn:  # some of them, in any order, maybe nobody
            ends[rank % world_size].drive()
        for end in ends:
            end.state_dict()  # catches up: a real rank has sent before it waits
        if world_size > 2:  # and owners have sent the sums of their parts
            drive(ends)
        for end, each in zip(ends, sent, strict=True):
            end.wait("a test")
            found = torch.empty(numel)
            end.sum_into(0, 1, found[:1])
            end.sum_into(1, numel, found[1:])
            assert torch.equal(found, expected)
            assert torch.equal(end.contribution(side), each)
            end.release()
        for end, other in zip(ends, plain, strict=True):
            assert same_state(end.state_dict(), other.state_dict())


def test_the_training_thread_only_says_that_it_begins() -> None:
    wire, ends = driven(2)
    begun(ends)
    assert not wire.waiting
    assert not any(end.poll() for end in ends)
    assert [end.sent_bytes for end in ends] == [0, 0]
    for end in ends:
        pause_s = end.drive()
    assert pause_s is None  # the second one finds the first one's message
    assert wire.waiting
    assert ends[1].poll()
    assert not ends[0].poll()
    drive(ends)
    assert ends[0].poll()


def test_it_is_looked_for_a_sum_that_has_not_come() -> None:
    wire, ends = driven(2)
    wire.late.add(1)
    begun(ends)
    for end in ends:
        end.drive()
    pause_s = ends[0].drive()
    assert pause_s is not None
    assert 0.0 < pause_s <= 0.02
    wire.late.clear()
    wire.deliver()
    assert ends[0].drive() is None
    assert ends[0].poll()


def test_nothing_depends_on_the_other_thread() -> None:
    _, ends = driven(2)
    expected, states = known(2, [10, 20])
    for side, seed in ((0, 10), (1, 20)):
        begun(ends, seed, side)
        for end in ends:
            end.state_dict()  # which catches up, so both have sent
        found = [end.finish("a test").clone() for end in ends]
        assert all(torch.equal(found[0], each) for each in found)
    assert torch.equal(found[0], expected)
    for end, state in zip(ends, states, strict=True):
        assert same_state(end.state_dict(), state)


def test_a_sum_that_is_read_in_parts_takes_no_memory_of_its_own() -> None:
    _, ends = driven(2)
    expected, _ = known(2, [10])
    begun(ends)
    drive(ends)
    for end in ends:
        assert torch.equal(whole(end.sum_into), expected)
        assert end.is_collected is False
        assert end._coded._result is None
        assert end.finish("a test").data_ptr() == end.result(0).data_ptr()
    _, plain = exchanges(2, CODECS["int4"], NUMEL)
    assert ends[0].extra_bytes == plain[0].extra_bytes


def test_sums_with_memory_stay_while_the_next_is_under_way() -> None:
    _, ends = driven(2, sums=2)
    begun(ends, 10)
    drive(ends)
    first = [end.finish("a test") for end in ends]
    begun(ends, 20, side=1)
    drive(ends)
    expected, _ = known(2, [10])
    assert all(torch.equal(each, expected) for each in first)


def test_an_adopted_sum_is_kept_before_the_next_message_begins() -> None:
    _, ends = driven(2)
    expected, states = known(2, [10, 20])
    begun(ends, 10)
    drive(ends)
    for end in ends:
        end.wait("a test")
        end.release()
        end.release()  # a second time is none
    begun(ends, 20, side=1)  # nobody has driven in between
    drive(ends)
    for end, state in zip(ends, states, strict=True):
        assert torch.equal(end.finish("a test"), expected)
        assert same_state(end.state_dict(), state)


@pytest.mark.parametrize("is_driven", [True, False])
def test_a_message_under_way_is_not_in_the_state(is_driven: bool) -> None:
    wire, ends = driven(2)
    begun(ends, 10)
    drive(ends)
    for end in ends:
        end.finish("a test")
    _, states = known(2, [10])
    wire.late.add(1)
    begun(ends, 20, side=1)
    if is_driven:
        for end in ends:
            end.drive()
    for end, state in zip(ends, states, strict=True):
        assert same_state(end.state_dict(), state)
    with pytest.raises(ProtocolError, match=r"load_state_dict\(\) came when a message"):
        ends[0].load_state_dict(states[0])
    with pytest.raises(ProtocolError, match=r"begin\(\) came when a message is under"):
        ends[0].begin(0)


@pytest.mark.parametrize("side", [0, 1])
def test_a_second_message_is_refused_before_the_first_has_been_sent(side: int) -> None:
    wire, ends = driven(2)
    begun(ends, 10)
    with pytest.raises(ProtocolError, match=r"begin\(\) came when a message is under"):
        ends[0].begin(side)
    assert not wire.waiting
    drive(ends)
    expected, _ = known(2, [10])
    assert all(torch.equal(end.finish("a test"), expected) for end in ends)


def test_what_failed_is_done_again_elsewhere_as_if_it_had_not_been() -> None:
    wire, ends = driven(2)
    begun(ends, 10)
    drive(ends)
    for end in ends:
        end.finish("a test")
    wire.late.add(1)
    begun(ends, 20, side=1)
    for end in ends:
        end.drive()
    with pytest.raises(
        CommunicationError, match="a test: the message of rank 1 failed on rank 0"
    ):
        ends[0].wait("a test")
    assert ends[0].poll()
    assert ends[0].drive() is None
    _, again = driven(2)
    for old, new in zip(ends, again, strict=True):
        new.load_state_dict(old.state_dict())
        old.retire()
    begun(again, 20, side=1)
    drive(again)
    expected, states = known(2, [10, 20])
    for end, state in zip(again, states, strict=True):
        assert torch.equal(end.finish("a test"), expected)
        assert same_state(end.state_dict(), state)


def test_a_rank_that_failed_commits_what_another_one_had() -> None:
    wire, ends = driven(2)
    wire.late.add(1)
    begun(ends)
    with pytest.raises(CommunicationError, match="the message of rank 1 failed"):
        ends[0].wait("a test")
    ends[0].commit()
    ends[0].commit()
    _, states = known(2, [10])
    assert same_state(ends[0].state_dict(), states[0])
    with pytest.raises(ProtocolError, match="a message failed or was given up"):
        ends[0].begin(1)


def test_a_sum_that_nobody_adopts_leaves_residuals_alone() -> None:
    _, ends = driven(2)
    begun(ends)
    drive(ends)
    for end in ends:
        end.wait("a test")
        end.rollback()
        assert not bool(end.state_dict()["residual"].any())
        with pytest.raises(ProtocolError, match=r"sum_into\(\) came when nothing"):
            end.sum_into(0, 1, torch.empty(1))
    begun(ends)
    drive(ends)
    assert torch.equal(ends[0].finish("a test"), known(2, [10])[0])


def test_a_message_given_up_half_way_breaks_the_exchange() -> None:
    _, ends = driven(2)
    begun(ends[:1])
    ends[0].rollback()
    assert ends[0].poll()
    assert ends[0].drive() is None
    with pytest.raises(CommunicationError, match="a message was given up; expected a"):
        ends[0].wait("a test")
    with pytest.raises(ProtocolError, match="a message failed or was given up"):
        ends[0].begin(1)


def test_only_who_waits_asks_why_something_failed() -> None:
    peer, end = talkative()
    peer.broken = True
    end.contribution(0)[-1] = 1.0
    end.begin(0)
    assert end.drive() is None
    assert end.poll()
    assert peer.asked == 0
    for _ in range(2):
        with pytest.raises(CommunicationError, match="rank 7 is gone; send between"):
            end.wait("a test")
    assert peer.asked == 1


def test_a_negative_weight_is_told_where_it_is_waited_for() -> None:
    peer, end = talkative()
    end.contribution(0)[-1] = -1.0
    end.begin(0)
    end.drive()
    with pytest.raises(ProtocolError, match="a weight that is not negative, got -1"):
        end.wait("a test")
    assert peer.asked == 0


@pytest.mark.parametrize("is_driven", [True, False])
def test_what_goes_wrong_beside_the_training_thread_is_raised_on_it(
    monkeypatch: pytest.MonkeyPatch, is_driven: bool
) -> None:
    _, end = talkative()

    def no_memory(values: torch.Tensor, residual: torch.Tensor) -> None:
        raise MemoryError("no memory for a test")

    monkeypatch.setattr(end._coded._route, "begin", no_memory)
    end.begin(0)
    if is_driven:
        assert end.drive() is None
        assert end.poll()
    for call in (lambda: end.wait("a test"), end.state_dict, lambda: end.begin(1)):
        with pytest.raises(MemoryError, match="no memory for a test"):
            call()


def test_nothing_is_done_for_an_exchange_that_has_retired() -> None:
    wire, ends = driven(2)
    begun(ends)
    ends[0].retire()
    assert ends[0].drive() is None
    assert not wire.waiting


def test_what_follows_is_made_of_the_sum_before_that_is_said_to_be_there() -> None:
    _, ends = driven(2)
    expected, _ = known(2, [10])
    found: list[torch.Tensor] = []
    begun(ends)
    drive(ends)
    assert ends[0].poll()
    ends[0].follow_up(lambda read: found.append(whole(read)), always)
    assert not ends[0].poll()
    assert not found  # only said, on the training thread
    assert ends[0].drive() is None
    assert ends[0].poll()
    ends[0].wait("a test")
    assert len(found) == 1
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("driven_first", [False, True])
def test_whoever_waits_makes_it_itself(driven_first: bool) -> None:
    wire, ends = driven(2)
    expected, residuals = known(2, [10])
    wire.late.add(1)
    begun(ends)
    for end in ends:
        own = end.contribution(0)
        end.follow_up(lambda read, own=own: own.copy_(2.0 * whole(read)), always)
        if driven_first:
            end.drive()
        end.state_dict()
    assert not any(end.poll() for end in ends[:1])
    wire.late.clear()
    wire.deliver()
    for end, residual in zip(ends, residuals, strict=True):
        end.wait("a test")
        assert torch.equal(end.contribution(0), 2.0 * expected)
        end.release()
        assert same_state(end.state_dict(), residual)  # kept before that


def test_what_is_put_off_is_done_in_turn_and_at_the_latest_when_asked_for() -> None:
    _, ends = driven(2)
    done: list[str] = []
    begun(ends)
    drive(ends)
    for end in ends:
        end.wait("a test")
        end.release()
    ends[0].put_off(lambda: done.append("first"))
    ends[0].put_off(lambda: done.append("second"))
    assert not done
    ends[0].settle()
    assert done == ["first", "second"]
    drive(ends)
    assert len(done) == 2


def test_nothing_follows_a_message_that_fails() -> None:
    peer, end = talkative()
    peer.broken = True
    end.begin(0)
    end.follow_up(lambda read: pytest.fail("there is no sum"), always)
    end.drive()
    assert end.poll()
    with pytest.raises(CommunicationError, match="rank 7 is gone"):
        end.wait("a test")


def test_nothing_follows_a_sum_that_nobody_adopts_nor_the_next_one() -> None:
    _, ends = driven(2)
    begun(ends)
    drive(ends)
    for end in ends:
        end.follow_up(lambda read: pytest.fail("nobody adopts it"), always)
        end.rollback()
        assert end.poll()
    begun(ends)
    drive(ends)
    assert torch.equal(ends[0].finish("a test"), known(2, [10])[0])


def test_one_work_follows_one_message() -> None:
    _, ends = driven(2)
    with pytest.raises(ProtocolError, match="when nothing is under way"):
        ends[0].follow_up(print, always)
    begun(ends)
    ends[0].follow_up(lambda read: None, always)
    with pytest.raises(ProtocolError, match="came twice"):
        ends[0].follow_up(lambda read: None, always)


def test_what_cannot_be_made_is_raised_where_it_is_waited_for() -> None:
    _, ends = driven(2)

    def fails(read: SumReader) -> None:
        raise ProtocolError("the step is none")

    begun(ends)
    ends[0].follow_up(fails, always)
    for end in (*ends, *ends):
        end.drive()
    assert ends[0].poll()
    with pytest.raises(ProtocolError, match="the step is none"):
        ends[0].wait("a test")


@pytest.mark.parametrize("comes", ["never", "driven", "asked"])
def test_what_follows_waits_until_the_sum_will_be_adopted(comes: str) -> None:
    """Until then a rank may die, and what is written over may be sent again."""
    _, ends = driven(2)
    expected, residuals = known(2, [10])
    begun(ends)
    found: list[torch.Tensor] = []
    others: list[str] = []
    ends[0].follow_up(lambda read: found.append(whole(read)), lambda: bool(others))
    for _ in range(2):
        for end in ends:
            end.drive()
    assert ends[0].drive() is not None, "it is not asked again"
    assert not ends[0].poll()
    assert not ends[0].has_sum
    assert not found
    assert not bool(ends[0].state_dict()["residual"].any())
    if comes == "never":
        with pytest.raises(ProtocolError, match="before all other sums of the reduct"):
            ends[0].wait("a test")
        ends[0].retire()
        others.append("too late")
        assert ends[0].drive() is None
        assert not found
        return
    others.append("here")
    if comes == "driven":
        assert ends[0].drive() is None
    assert ends[0].has_sum
    assert torch.equal(found[0], expected)
    assert same_state(ends[0].state_dict(), residuals[0])


def test_a_sum_is_had_when_it_can_be_taken_without_the_others() -> None:
    wire, ends = driven(2)
    assert not ends[0].has_sum
    wire.late.add(1)
    begun(ends)
    for end in ends:
        end.drive()
    assert [end.has_sum for end in ends] == [False, True]
    with pytest.raises(CommunicationError, match="the message of rank 1 failed"):
        ends[0].wait("a test")
    assert not ends[0].has_sum
    ends[1].wait("a test")
    assert ends[1].has_sum
    ends[1].release()
    assert not ends[1].has_sum
