"""Codecs: exact sizes, bounded errors, known bytes, nothing hidden."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.codec.codec import (
    CODECS,
    LIMIT,
    Codec,
    CodedMessage,
    chunks_of,
    parts_of,
)
from tests.comm.codec.codec_bounds import error_bound

NAMES = tuple(CODECS)
QUANTISED = ("int8", "int4")


def encoded(codec: Codec, values: torch.Tensor) -> CodedMessage:
    message = CodedMessage(codec, range(values.numel()))
    message.memory.fill_(255)
    for chunk in chunks_of(message.part):
        message.write(chunk, values[chunk.start : chunk.stop])
    return message


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, 123.0)
    message = encoded(codec, values)
    message.read(message.part, out)
    return out


@st.composite
def numbers(draw: st.DrawFn) -> torch.Tensor:
    """Values of very different magnitudes, some blocks of them and a remainder."""
    some = st.floats(width=32, allow_nan=False, allow_infinity=False)
    listed = draw(st.lists(some.filter(lambda x: abs(x) < LIMIT), max_size=20))
    size = draw(st.integers(0, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    exponents = torch.rand(size, generator=generator) * draw(st.integers(0, 60)) - 30
    noise = torch.randn(size, generator=generator) * 2.0**exponents
    return torch.cat([noise, torch.tensor(listed, dtype=torch.float32)])


@pytest.mark.parametrize("name", NAMES)
@given(values=numbers())
def test_no_element_is_further_off_than_its_block_allows(
    name: str, values: torch.Tensor
) -> None:
    codec = CODECS[name]
    found = round_trip(codec, values)
    for begin in range(0, values.numel(), codec.block):
        block = values[begin : begin + codec.block].double()
        bound = error_bound(codec, float(block.abs().max()))
        errors = (found[begin : begin + codec.block].double() - block).abs()
        assert float(errors.max()) <= bound


@given(
    name=st.sampled_from(NAMES),
    values=numbers(),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_pieces_of_blocks_are_encoded_as_the_whole_is(
    name: str, values: torch.Tensor, cuts: list[int]
) -> None:
    codec = CODECS[name]
    whole = encoded(codec, values).memory
    size = values.numel()
    edges = sorted({0, size, *(min(size, cut * codec.block) for cut in cuts)})
    pieces = [range(begin, end) for begin, end in itertools.pairwise(edges)]
    message = CodedMessage(codec, range(size))
    message.memory.fill_(255)
    for piece in pieces:
        message.write(piece, values[piece.start : piece.stop])
    assert torch.equal(message.memory, whole)


@given(
    name=st.sampled_from(NAMES),
    values=numbers(),
    edges=st.lists(st.integers(0, 320), max_size=5).map(sorted),
)
def test_any_piece_is_decoded_as_in_the_whole(
    name: str, values: torch.Tensor, edges: list[int]
) -> None:
    message, size = encoded(CODECS[name], values), values.numel()
    out = torch.full_like(values, 123.0)
    for begin, end in itertools.pairwise([0, *(min(size, at) for at in edges), size]):
        message.read(range(begin, end), out[begin:end])
    assert torch.equal(out, round_trip(CODECS[name], values))


@pytest.mark.parametrize(
    ("name", "numel", "size_bytes"),
    [
        ("fp32", 1000, 4000),
        ("bf16", 1000, 2000),
        ("int8", 128, 130),
        ("int8", 129, 260),
        ("int8", 1_000_064, 1_015_690),
        ("int4", 32, 18),
        ("int4", 33, 36),
        ("int4", 1_000_000, 562_500),
        ("int4", 0, 0),
    ],
)
def test_encoded_sizes_are_the_documented_ones(
    name: str, numel: int, size_bytes: int
) -> None:
    codec = CODECS[name]
    assert codec.encoded_bytes(numel) == size_bytes
    message = CodedMessage(codec, range(numel))
    assert 8 <= message.memory.numel() - size_bytes < 16


def test_the_bytes_of_int8() -> None:
    values = torch.zeros(128)
    values[:5] = torch.tensor([127.0, -127.0, 1.4, -2.6, 0.5])
    memory = encoded(CODECS["int8"], values).memory
    assert memory[:6].view(torch.int8).tolist() == [127, -127, 1, -3, 0, 0]
    assert memory[128:130].view(torch.bfloat16).tolist() == [1.0]


def test_the_bytes_of_int4() -> None:
    values = torch.zeros(32)
    values[0], values[16] = 7.0, -7.0
    values[1], values[17] = -2.6, 3.4
    memory = encoded(CODECS["int4"], values).memory
    # Low half of a byte: the block's first half; each code plus 8.
    assert memory[:3].tolist() == [15 + 16 * 1, 5 + 16 * 11, 8 + 16 * 8]
    assert memory[16:18].view(torch.bfloat16).tolist() == [1.0]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_scale_is_rounded_up_so_that_the_largest_code_is_not_exceeded(
    name: str,
) -> None:
    codec = CODECS[name]
    for exponent in range(-20, 20):
        for step in range(64):
            values = torch.zeros(codec.block)
            values[0] = largest = 2.0**exponent * (1 + step / 64)
            memory = encoded(codec, values).memory
            place = slice(codec.code_bytes, codec.code_bytes + 2)
            scale = float(memory[place].view(torch.bfloat16)[0])
            assert scale * codec.largest_code >= largest * (1 - 2**-22)
            assert scale * codec.largest_code <= largest * (1 + 2**-7)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**127])
def test_what_is_no_number_spoils_its_block_and_no_other(name: str, bad: float) -> None:
    codec = CODECS[name]
    values = torch.ones(3 * codec.block)
    message = CodedMessage(codec, range(values.numel()))
    assert message.write(message.part, values)
    values[codec.block + 3] = bad
    assert not message.write(message.part, values)
    out = torch.zeros_like(values)
    message.read(message.part, out)
    first, spoilt, last = out.split(codec.block)
    assert bool(spoilt.isnan().all())
    assert bool(torch.cat([first, last]).isfinite().all())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_floating_point_codecs_keep_what_is_no_number(name: str, bad: float) -> None:
    codec = CODECS[name]
    values = torch.tensor([1.0, bad, 2.0])
    message = CodedMessage(codec, range(3))
    assert not message.write(message.part, values)
    assert torch.equal(round_trip(codec, values).isfinite(), values.isfinite())


@given(
    numel=st.integers(0, 2000),
    world_size=st.integers(2, 9),
    block=st.sampled_from([1, 32, 128]),
)
def test_parts_cover_all_elements_in_order(
    numel: int, world_size: int, block: int
) -> None:
    parts = parts_of(numel, world_size, block)
    assert len(parts) == world_size
    assert [index for part in parts for index in part] == list(range(numel))
    assert all(part.start % block == 0 for part in parts if part)
    assert all(0 <= part.start <= part.stop <= numel for part in parts)
    blocks = [-(-len(part) // block) for part in parts]
    assert max(blocks) - min(blocks) <= 1
