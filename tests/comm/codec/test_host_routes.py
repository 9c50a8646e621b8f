"""Sums over hosts: one message between two hosts, and the same bits on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.codec.codec import CODECS, Codec
from elche.comm.codec.codec_routes import sent_bytes
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.host_exchange import leaders_of, spans_hosts
from elche.errors import CommunicationError
from tests.comm.peers import Peer, Wire, message, same_state

MIXES = ("aabb", "abab", "aab", "abcc", "aabbccc", "baa")


def on_hosts(hosts: str, codec: Codec, numel: int) -> tuple[Wire, list[CodedExchange]]:
    """The ranks' ends of one exchange; a letter per rank names its host."""
    wire = Wire(len(hosts))
    ends = [
        CodedExchange(Peer(wire, rank), codec, numel, 0, tuple(hosts))
        for rank in range(len(hosts))
    ]
    return wire, ends


def summed(
    ends: list[CodedExchange], messages: list[torch.Tensor]
) -> list[torch.Tensor]:
    for end, each in zip(ends, messages, strict=True):
        end.contribution(0).copy_(each)
        end.begin(0)
    poll_all(ends)
    return [end.finish("a test").clone() for end in ends]


def poll_all(ends: list[CodedExchange]) -> None:
    """Polls as often as messages follow from messages: up, between (twice), down."""
    for _ in range(4):
        for end in ends:
            end.poll()
    assert all(end.poll() for end in ends)


def left_out(ends: list[CodedExchange]) -> torch.Tensor:
    """What sums of messages of weight 1 lack so far."""
    total = torch.zeros(len(ends[0].contribution(0)) - 1, dtype=torch.float64)
    for exchange in ends:
        state = exchange.state_dict()
        residual = state["residual"].double() * state["ranks"]
        begin, end = state["own"]
        residual[begin:end] *= state["world_size"] / state["ranks"]
        total += residual
    return total


def test_hosts_are_spanned_where_some_ranks_share_one_and_others_do_not() -> None:
    spanned = ["", "a", "aa", "ab", "aab", "aba"]
    assert [spans_hosts(tuple(each)) for each in spanned] == [False] * 4 + [True] * 2
    assert leaders_of(tuple("baabc")) == [0, 1, 4]


@given(
    st.sampled_from(MIXES),
    st.sampled_from([1, 3, 130, 700]),
    st.integers(0, 1000),
    st.data(),
)
def test_plain_messages_are_summed_by_hosts(
    hosts: str, numel: int, seed: int, data: st.DataObject
) -> None:
    """To the bit: within a host in the order of ranks, then in that of the leaders."""
    weights = data.draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 2.5]), min_size=len(hosts), max_size=len(hosts)
        )
    )
    _, ends = on_hosts(hosts, CODECS["fp32"], numel + 1)
    sent = [message(seed + rank, numel, w) for rank, w in enumerate(weights)]
    found = summed(ends, sent)
    total = torch.zeros(numel)
    for leader in leaders_of(tuple(hosts)):
        own = torch.zeros(numel)
        for rank, host in enumerate(hosts):
            if host == hosts[leader] and weights[rank]:
                own += sent[rank][:-1]
        total += own
    for each in found:
        assert torch.equal(each, found[0])
        assert float(each[-1]) == sum(weights)
    torch.testing.assert_close(found[0][:-1], total, rtol=1e-6, atol=1e-6)
    for end, each in zip(ends, sent, strict=True):
        assert torch.equal(end.contribution(0), each)


@pytest.mark.parametrize("hosts", MIXES)
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_what_encoding_takes_off_comes_later(hosts: str, codec: str) -> None:
    """Once per host and once per sum: members of a host keep nothing."""
    numel, world_size = 700, len(hosts)
    _, ends = on_hosts(hosts, CODECS[codec], numel + 1)
    true, got = torch.zeros(numel).double(), torch.zeros(numel).double()
    for number in range(3):
        sent = [message(10 * number + rank, numel) for rank in range(world_size)]
        found = summed(ends, sent)
        assert all(torch.equal(each, found[0]) for each in found)
        assert float(found[0][-1]) == world_size
        true += torch.stack(sent).double().sum(0)[:-1]
        got += found[0][:-1].double()
    assert float((true - got).abs().max()) > 0
    torch.testing.assert_close(got + left_out(ends), true, rtol=0, atol=2e-5)
    leaders = leaders_of(tuple(hosts))
    for rank, end in enumerate(ends):
        is_empty = not bool(end.state_dict()["residual"].any())
        assert is_empty is (rank not in leaders)


@pytest.mark.parametrize("hosts", MIXES)
def test_only_leaders_send_to_other_hosts(hosts: str) -> None:
    """As much as if each host were one rank."""
    codec, numel = CODECS["int8"], 700
    _, ends = on_hosts(hosts, codec, numel + 1)
    summed(ends, [message(rank, numel) for rank in range(len(hosts))])
    leaders = leaders_of(tuple(hosts))
    for rank, end in enumerate(ends):
        expected = 0
        if rank in leaders:
            place = leaders.index(rank)
            expected = sent_bytes(codec, numel, len(leaders), place)
        assert end.remote_bytes == expected
        assert end.sent_bytes >= expected
        assert end.extra_bytes > 4 * numel


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_message_that_is_no_number_spoils_no_residual(bad: int) -> None:
    _, ends = on_hosts("aabb", CODECS["int8"], 301)
    summed(ends, [message(rank, 300) for rank in range(4)])
    before = [end.state_dict() for end in ends]
    sent = [message(10 + rank, 300) for rank in range(4)]
    sent[bad][7] = math.nan
    for each in summed(ends, sent):
        assert bool(each.isnan().all())
    for end, state in zip(ends, before, strict=True):
        assert same_state(end.state_dict(), state)
    sent[bad] *= 0.0  # left out instead, it is a sum like any other
    sent[bad][-1] = 0.0
    found = summed(ends, sent)
    assert all(torch.equal(each, found[0]) for each in found)
    assert bool(found[0].isfinite().all())
    assert float(found[0][-1]) == 3.0


@pytest.mark.parametrize("late", range(4))
def test_what_failed_is_done_again_as_if_it_had_not_been(late: int) -> None:
    """Whoever was late; members of a host are told by whom they wait for."""
    codec = CODECS["int4"]
    wire, ends = on_hosts("aabb", codec, 301)
    summed(ends, [message(rank, 300) for rank in range(4)])
    states = [end.state_dict() for end in ends]
    again = [message(10 + rank, 300) for rank in range(4)]
    wire.late.add(late)
    for end, each in zip(ends, again, strict=True):
        end.contribution(0).copy_(each)
        end.begin(0)
    for _ in range(4):
        for end in ends:
            end.poll()
    told = 0
    for end in ends:
        try:
            end.wait("a test")
        except CommunicationError as error:
            told += "a test: the message of rank" in str(error)
    assert told >= 2
    _, redone = on_hosts("aabb", codec, 301)
    for old, new, state in zip(ends, redone, states, strict=True):
        old.rollback()
        assert same_state(old.state_dict(), state)
        new.load_state_dict(old.state_dict())
    _, whole = on_hosts("aabb", codec, 301)
    for end, state in zip(whole, states, strict=True):
        end.load_state_dict(state)
    expected, found = summed(whole, again), summed(redone, again)
    assert all(torch.equal(each, expected[0]) for each in (*found, *expected))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("aabb", "aabb"),
        ("aabb", "abcd"),
        ("abcd", "aabb"),
        ("aabb", "ab"),
        ("ab", "aab"),
    ],
)
def test_residuals_go_on_in_another_membership(before: str, after: str) -> None:
    """The last ranks leave, or new ones come; what a leaver had goes with it."""
    codec, stay = CODECS["int4"], min(len(before), len(after))
    _, old = on_hosts(before, codec, 701)
    sent = [message(rank, 700) for rank in range(len(before))]
    summed(old, sent)
    _, new = on_hosts(after, codec, 701)
    for old_end, new_end in zip(old[:stay], new[:stay], strict=True):
        new_end.load_state_dict(old_end.state_dict())
    missing = left_out(old[:stay])
    torch.testing.assert_close(left_out(new), missing, rtol=1e-6, atol=1e-6)
    if before == after:
        for old_end, new_end in zip(old, new, strict=True):
            assert same_state(new_end.state_dict(), old_end.state_dict())
    silent = [torch.cat([torch.zeros(700), torch.ones(1)]) for _ in after]
    found = summed(new, silent)
    got = found[0][:-1].double() + left_out(new)
    torch.testing.assert_close(got, missing, rtol=0, atol=1e-5)


@pytest.mark.parametrize("hosts", ["", "aab", "aabb", "abab", "abc"])
@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_some_elements_travel_as_they_are(hosts: str, codec: str) -> None:
    """Their sums are exact, whatever stands beside them and on every route."""
    world_size, numel, exact = len(hosts) or 2, 70, 3
    wire = Wire(world_size)
    ends = [
        CodedExchange(
            Peer(wire, rank),
            CODECS[codec],
            numel + exact + 1,
            0,
            tuple(hosts),
            exact,
        )
        for rank in range(world_size)
    ]
    for number in range(3):
        sent = [message(10 * number + rank, numel) for rank in range(world_size)]
        tails = [torch.tensor([1e-3, 1.0, rank + 0.5]) for rank in range(world_size)]
        whole = [
            torch.cat([each[:-1], tail, each[-1:]])
            for each, tail in zip(sent, tails, strict=True)
        ]
        first, *others = summed(ends, whole)
        assert all(torch.equal(first, other) for other in others)
        assert torch.equal(first[numel:-1], torch.stack(tails).sum(0))
        assert float(first[-1]) == world_size
        true = torch.stack(whole).sum(0)
        assert 0.0 < float((first - true)[:numel].abs().max()) < 0.5 * world_size
