"""What is equal on all ranks is found by digests; every bit of it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.comm.tensors.equal_tensors import differing, digest_of, make_equal
from tests.comm.thread_group import on_ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (2, 0, 4))


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that are equal in every call."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(2, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_one_bit_of_one_rank_is_seen(
    dtype: torch.dtype, shape: tuple[int, ...], ranks: int, data: st.DataObject
) -> None:
    models = [
        [("a", tensor_of((4,), torch.float32)), ("b", tensor_of(shape, dtype))]
        for _ in range(ranks)
    ]
    assert on_ranks(ranks, differing, models) == [[]] * ranks
    rank = data.draw(st.integers(0, ranks - 1))
    changed = models[rank][1][1]
    if changed.numel() == 0:
        return
    bits = changed.reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, bits.numel() - 1))
    # What a bool holds is one bit of its byte.
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 7))
    bits[place] = int(bits[place]) ^ (1 << bit)
    assert on_ranks(ranks, differing, models) == [[1]] * ranks
    on_ranks(ranks, make_equal, models, ["a test"] * ranks)
    assert on_ranks(ranks, differing, models) == [[]] * ranks


@pytest.mark.parametrize(
    "other",
    [
        ("b", torch.zeros(6)),
        ("a", torch.zeros(2, 3)),
        ("a", torch.zeros(6, dtype=torch.int32)),
        ("a", torch.zeros(3, dtype=torch.float64)),
        ("a", -torch.zeros(6)),
    ],
)
def test_name_shape_and_dtype_count(other: tuple[str, torch.Tensor]) -> None:
    assert digest_of(*other) != digest_of("a", torch.zeros(6))


def test_strides_and_memory_do_not_count() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest_of("a", matrix.t().contiguous().t()) == digest_of("a", matrix)
    nan = torch.full((3,), torch.nan)
    assert digest_of("a", nan) == digest_of("a", nan.clone())


def test_one_rank_alone_compares_nothing() -> None:
    def alone(group: Any, named: list[tuple[str, torch.Tensor]]) -> tuple[Any, int]:
        return differing(group, named), group.reductions

    assert on_ranks(1, alone, [[("a", torch.zeros(3))]]) == [([], 0)]
    assert on_ranks(2, alone, [[], []]) == [([], 0)] * 2
