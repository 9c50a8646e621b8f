"""Sums in encoded form: equal on all ranks, and what they leave out comes later."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.comm.codec.codec import CODECS, Codec
from elche.comm.codec.coded_exchange import open_coded_exchange
from elche.errors import ProtocolError
from tests.comm.codec.codec_bounds import error_bound
from tests.comm.peers import (
    Peer,
    Wire,
    coded,
    exchanges,
    left_out,
    message,
    poll_all,
    summed,
)
from tests.comm.thread_group import on_ranks

NAMES = tuple(CODECS)


def one_error(codec: Codec, weights: float) -> float:
    """How far a sum of any number of rounds may be off, elements being at most 1.

    A residual e of a rank's messages is at most f (1 + e) per unit of weight, f being
    the error of an element that is the largest of its block. The mean that an owner
    encodes is at most 1 + 2 e and its own residual.
    """
    factor = error_bound(codec, 1.0)
    sent = factor / (1 - factor)
    mean = factor * (1 + 2 * sent) / (1 - factor)
    return weights * (sent + mean + 1e-4)


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=2, max_size=5),
    name=st.sampled_from(NAMES),
    numel=st.integers(0, 700),
    rounds=st.integers(1, 6),
    repeats=st.booleans(),
)
def test_sums_are_equal_and_all_that_was_sent_arrives_in_the_end(
    weights: list[float], name: str, numel: int, rounds: int, repeats: bool
) -> None:
    codec, world_size = CODECS[name], len(weights)
    _, ends = exchanges(world_size, codec, numel + 1)
    true = torch.zeros(numel + 1, dtype=torch.float64)
    found = torch.zeros_like(true)
    for number in range(rounds):
        seed = 0 if repeats else 100 * number
        sent = [message(seed + r, numel, weight) for r, weight in enumerate(weights)]
        sums = summed(ends, sent)
        assert all(torch.equal(each, sums[0]) for each in sums)
        assert float(sums[0][-1]) == sum(weights)
        true += sum(each.double() for each in sent)
        found += sums[0].double()
    off = (true - found)[:-1]
    rounding = 1e-5 * sum(weights)
    torch.testing.assert_close(off, left_out(ends, weights), rtol=0, atol=rounding)
    assert not numel or float(off.abs().max()) <= one_error(codec, sum(weights))


@given(
    world_size=st.integers(2, 4),
    name=st.sampled_from(NAMES),
    edges=st.lists(st.integers(0, 301), max_size=5).map(sorted),
)
def test_the_sum_in_parts_is_the_sum(
    world_size: int, name: str, edges: list[int]
) -> None:
    _, ends = exchanges(world_size, CODECS[name], 301)
    for rank, end in enumerate(ends):
        end.contribution(0).copy_(message(rank, 300))
        assert rank == 0 or not ends[0].poll()
        end.begin(0)
    poll_all(ends)
    for end in ends:
        found = torch.full((301,), 9.0)
        for start, stop in itertools.pairwise([0, *edges, 301]):
            end.sum_into(start, stop, found[start:stop])
        assert torch.equal(found, end.finish("a test"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_what_else_is_made_has_another_dtype_than_messages(
    name: str, dtype: torch.dtype
) -> None:
    """A script makes a model in bfloat16, say; its averages are float32 even so."""
    sent = [message(rank, 300) for rank in range(4)]
    wanted, got = [], []
    for sums, default in ((wanted, torch.float32), (got, dtype)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            for world_size in (2, 3, 4):
                _, ends = exchanges(world_size, CODECS[name], 301)
                for _ in range(2):
                    sums += summed(ends, sent[:world_size])
        finally:
            torch.set_default_dtype(before)
    for one, other in zip(wanted, got, strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)


def test_polling_one_exchange_advances_all_of_its_group() -> None:
    """So that a link is busy with later buckets while a rank waits for the first."""
    wire, numel = Wire(2), 256
    peers = [Peer(wire, rank) for rank in range(2)]
    first, second = (
        [coded(peer, CODECS["int8"], numel + 1, tag) for peer in peers]
        for tag in (0, 2)
    )
    for end in (*first, *second):
        end.contribution(0).fill_(1.0)
        end.begin(0)
    offered = peers[0].sent_bytes
    poll_all(first)
    assert peers[0].sent_bytes == 2 * offered  # the sums of both exchanges
    for end in second:
        assert end.finish("a test").tolist() == pytest.approx([2.0] * (numel + 1), 0.01)
    assert not peers[0].exchanges


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_rank_sends_the_least_bytes_of_a_sum(world_size: int) -> None:
    codec, numel = CODECS["int8"], 1_280_000
    _, ends = exchanges(world_size, codec, numel + 1)
    summed(ends, [message(rank, numel) for rank in range(world_size)])
    parts = 2 * (world_size - 1) / world_size
    for end in ends:
        peer: Any = end._group
        expected = parts * codec.encoded_bytes(numel)
        assert peer.sent_bytes == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_of_weight_zero_sends_zeros_and_keeps_its_residual(
    world_size: int,
) -> None:
    _, ends = exchanges(world_size, CODECS["int4"], 301)
    summed(ends, [message(rank, 300) for rank in range(world_size)])
    before = ends[0].residual.clone()
    silent = torch.cat([torch.full((300,), math.nan), torch.zeros(1)])
    sent = [silent, *(message(rank, 300) for rank in range(1, world_size))]
    sums = summed(ends, sent)
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert bool(sums[0].isfinite().all())
    assert float(sums[0][-1]) == world_size - 1
    after = ends[0].residual.clone()
    own = ends[0]._hops.own  # of the sum, which others did send something to
    for kept in (before, after):
        kept[own.start : own.stop] = 0.0
    assert torch.equal(before, after)
    assert float(after.abs().max()) > 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_when_nobody_weighs_anything_nothing_moves(world_size: int) -> None:
    _, ends = exchanges(world_size, CODECS["int4"], 301)
    summed(ends, [message(rank, 300) for rank in range(world_size)])
    before = [end.residual.clone() for end in ends]
    for each in summed(ends, [torch.zeros(301)] * world_size):
        assert torch.equal(each, torch.zeros(301))
    for end, residual in zip(ends, before, strict=True):
        assert torch.equal(end.residual, residual)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_light_message_does_not_blow_up_the_error_of_a_heavy_one(
    world_size: int,
) -> None:
    codec = CODECS["int4"]
    _, ends = exchanges(world_size, codec, 301)
    summed(ends, [message(rank, 300, 1000.0) for rank in range(world_size)])
    light = [message(rank, 300, 1.0) for rank in range(world_size)]
    mean = summed(ends, light)[0] / world_size
    off = (mean - torch.stack(light).mean(0)).abs().max()
    # This mean's own error and the last one's; a sum's error would be 1000 times that.
    assert float(off) <= 2 * one_error(codec, 1.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("place", "bad"),
    [(0, math.nan), (150, -math.inf), (300, math.nan), (300, math.inf)],
)
@pytest.mark.every(7)
def test_what_is_no_number_makes_the_sum_none_on_every_rank(
    name: str, world_size: int, place: int, bad: float
) -> None:
    _, ends = exchanges(world_size, CODECS[name], 301)
    good = [message(rank, 300) for rank in range(world_size)]
    summed(ends, good)
    before = [end.residual.clone() for end in ends]
    spoilt = [each.clone() for each in good]
    spoilt[1][place] = bad
    for each in summed(ends, spoilt):
        assert bool(each.isnan().all())
    for end, residual in zip(ends, before, strict=True):
        assert torch.equal(end.residual, residual)
    sums = summed(ends, good)
    assert bool(sums[0].isfinite().all())
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_a_sum_that_leaves_float32_is_none_on_every_rank() -> None:
    _, ends = exchanges(3, CODECS["int8"], 301)
    huge = torch.cat([torch.full((300,), 1.5e38), torch.ones(1)])
    for each in summed(ends, [huge] * 3):
        assert bool(each.isnan().all())


@pytest.mark.parametrize(
    ("dtype", "codec"), [(torch.float32, "fp32"), (torch.float64, "int8")], ids=str
)
def test_what_is_not_encoded_goes_through_a_plain_exchange(
    dtype: torch.dtype, codec: str
) -> None:
    def opened(group: Any) -> str:
        return type(open_coded_exchange(group, 11, dtype, codec)).__name__

    assert on_ranks(2, opened) == ["GlooExchange"] * 2


def test_a_negative_weight_is_refused() -> None:
    _, ends = exchanges(2, CODECS["int8"], 3)
    ends[0].contribution(0)[-1] = -1.0
    with pytest.raises(
        ProtocolError, match=r"a weight that is not negative, got -1\.0"
    ):
        ends[0].begin(0)
