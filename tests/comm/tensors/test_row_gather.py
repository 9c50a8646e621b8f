"""Rows of all ranks, and the gradient that the weighted reduction needs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elche.comm.tensors.row_gather import RowGather
from elche.errors import MismatchError
from tests.comm.thread_group import on_ranks

WEIGHTS = st.sampled_from([0.0, 0.5, 1.0, 3.0])


def pair_loss(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The mean over some rows of what each has to do with all."""
    return (rows @ others.T).exp().sum(1).log().mean()


def linear() -> nn.Linear:
    """The same at every call, on any thread."""
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-0.6, 0.5, 6).view(2, 3))
        model.bias.fill_(0.1)
    return model


def backward(
    group: Any, x: torch.Tensor, weight: float, is_own: bool
) -> list[torch.Tensor]:
    """Gradients of the parameters as they are summed over ranks, weighted."""
    model = linear()
    own = model(x)
    rows = RowGather(group).gather(own, weight)
    pair_loss(own if is_own else rows, rows).backward()
    return [weight * p.grad for p in model.parameters() if p.grad is not None]


@given(
    st.lists(st.tuples(st.integers(1, 4), WEIGHTS), min_size=2, max_size=3),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_reduced_gradient_is_that_of_the_whole_batch(
    ranks: list[tuple[int, float]], is_own: bool
) -> None:
    """Each rank has the loss of all rows, or that of its own against all."""
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randn(n, 3, generator=draw).double() for n, _ in ranks]
    weights = [weight for _, weight in ranks]
    total = sum(weights)
    if not total:
        return
    found = on_ranks(len(ranks), backward, parts, weights, [is_own] * len(ranks))
    model = linear()
    counted = [(x, w) for x, w in zip(parts, weights, strict=True) if w]
    rows = model(torch.cat([x for x, _ in counted]))
    losses = [
        weight / total * pair_loss(model(x) if is_own else rows, rows)
        for x, weight in counted
    ]
    torch.stack(losses).sum().backward()
    for at, parameter in enumerate(model.parameters()):
        got = torch.stack([each[at] for each in found]).sum(0) / total
        torch.testing.assert_close(got, parameter.grad, rtol=1e-10, atol=1e-12)


def gathered(group: Any, rows: torch.Tensor, weight: float) -> torch.Tensor:
    return RowGather(group).gather(rows, weight)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32],
    ids=str,
)
def test_any_dtype_comes_bit_by_bit_in_order(dtype: torch.dtype) -> None:
    parts = [torch.arange(3 * n).sub(2).view(n, 3).to(dtype) for n in (3, 1, 4)]
    for found in on_ranks(3, gathered, parts, [1.0, 0.0, 2.0]):
        assert torch.equal(found, torch.cat([parts[0], parts[2]]))
    empty = [torch.empty(0, 5), torch.empty(0, 5)]
    assert on_ranks(2, gathered, empty, [1.0, 1.0])[0].shape == (0, 5)


def test_what_a_rank_of_weight_0_holds_does_not_spread() -> None:
    parts = [torch.ones(2, 3).double(), torch.full((1, 3), torch.nan).double()]
    first, _ = on_ranks(2, backward, parts, [2.0, 0.0], [True, True])
    assert all(torch.isfinite(each).all() for each in first)


@pytest.mark.parametrize(
    "other", [torch.ones(2, 4), torch.ones(2, 3).double(), torch.ones(2)], ids=str
)
def test_other_rows_are_refused_by_name(other: torch.Tensor) -> None:
    with pytest.raises(MismatchError, match=r"call 1: ranks pass \['rows \[3\] torch"):
        on_ranks(2, gathered, [torch.ones(2, 3), other], [1.0, 1.0])
    grown = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(MismatchError, match=r"torch\.float32 with gradient"):
        on_ranks(2, gathered, [torch.ones(2, 3), grown], [1.0, 1.0])
