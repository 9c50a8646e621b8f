"""Gradients that travel encoded: equal bits, nothing lost, ranks as threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elche.comm.codec.codec import CODECS, CodedMessage
from elche.comm.gradients.part_weights import StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.errors import MismatchError
from tests.comm.gradients.reduced_net import (
    Gradients,
    Net,
    alone,
    batch_of,
    gradients_of,
    trained,
)
from tests.comm.thread_group import ThreadGroup, on_ranks

LOSSY = ("bf16", "int8", "int4")
CAPS = (1, 1000, 1 << 20)
OFF = {"bf16": 0.02, "int8": 0.02, "int4": 0.3}
"""Of the largest element that a rank sends: twice rounded, beside what was left."""


def net() -> Net:
    return Net(33, torch.float32)


def coded(model: nn.Module, group: Any, codec: str, cap_bytes: int) -> GradientReducer:
    made = GradientReducer(list(model.parameters()), group, cap_bytes, codec=codec)
    made.attach()
    return made


def residuals(reducer: GradientReducer) -> dict[int, torch.Tensor]:
    """Per parameter, as part of what this rank sends for one unit of weight."""
    at = {id(p): index for index, p in enumerate(reducer.parameters)}
    return {
        at[id(parameter)]: left
        for bucket in reducer.buckets
        for parameter, left in zip(bucket.parameters, bucket.residuals(), strict=True)
    }


def unsent(reducer: GradientReducer, weight: float) -> dict[int, torch.Tensor]:
    """Part of the sum that this rank has not sent: of its own part by mean weights."""
    at = {id(p): index for index, p in enumerate(reducer.parameters)}
    found = {}
    for bucket in reducer.buckets:
        coded = bucket._coded
        assert coded is not None
        units = torch.full_like(coded.residual, weight)
        units[coded._hops.own.start : coded._hops.own.stop] = (
            1 / coded._group.world_size
        )
        parts = bucket._layout.parts(units * coded.residual)
        found |= dict(zip([at[id(p)] for p in bucket.parameters], parts, strict=True))
    return found


def same(one: Gradients, other: Gradients) -> bool:
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def true_gradient(number: int, sizes: Sequence[int]) -> Gradients:
    """What one process finds on the union batch."""
    return alone(number, sizes, model=net())


@settings(max_examples=20, deadline=None)
@given(
    codec=st.sampled_from(LOSSY),
    cap_bytes=st.sampled_from(CAPS),
    world_size=st.integers(2, 4),
    data=st.data(),
)
def test_all_ranks_get_the_same_bits_near_the_gradient_of_the_union(
    codec: str, cap_bytes: int, world_size: int, data: st.DataObject
) -> None:
    """Any shares, none among them; parameters that some ranks or all do not use."""
    some = st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)
    steps = data.draw(st.lists(some.filter(any), min_size=1, max_size=4))

    def run(group: ThreadGroup, model: Net) -> list[Gradients]:
        reducer = coded(model, group, codec, cap_bytes)
        return trained(reducer, model, group.rank, steps)

    ranks = on_ranks(world_size, run, [net() for _ in range(world_size)])
    largest = max(
        float(g.abs().max())
        for number, sizes in enumerate(steps)
        for rank, samples in enumerate(sizes)
        for g in true_gradient(number, [0] * rank + [samples])
        if g is not None
    )
    for number, sizes in enumerate(steps):
        first, *others = (found[number] for found in ranks)
        assert all(same(first, other) for other in others)
        for got, true in zip(first, true_gradient(number, sizes), strict=True):
            assert (got is None) == (true is None)
            if got is not None and true is not None:
                assert bool((got - true).abs().max() <= OFF[codec] * largest)


def total(found: Sequence[Gradients]) -> Gradients:
    """The sum over steps of each parameter's gradients."""
    return [
        sum((g.double() for g in each if g is not None), start=torch.zeros(()))
        for each in zip(*found, strict=True)
    ]


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("cap_bytes", CAPS)
@pytest.mark.parametrize(
    "plan",
    [
        *([sizes] * 6 for sizes in ((4, 4), (5, 1), (4, 0), (4, 4, 4))),
        *([(4,) * ranks, (2,) * ranks] * 4 for ranks in (2, 3)),
    ],
    ids=lambda plan: f"{plan[0]}, {plan[1]}",
)
@pytest.mark.every(5)
def test_what_is_not_sent_is_kept(
    codec: str, cap_bytes: int, plan: list[tuple[int, ...]]
) -> None:
    """What was handed out and what is left make the sum of the gradients.

    Also where buckets are laid out anew after the first pass, and where no rank uses
    the second layer in every other pass, and drops its sum.
    """

    def run(group: ThreadGroup, model: Net) -> tuple[list[Gradients], Any]:
        reducer = coded(model, group, codec, cap_bytes)
        found = trained(reducer, model, group.rank, plan)
        return found, unsent(reducer, plan[-1][group.rank] / sum(plan[-1]))

    ranks = on_ranks(len(plan[0]), run, [net() for _ in plan[0]])
    got = total(ranks[0][0])
    true = total([true_gradient(number, sizes) for number, sizes in enumerate(plan)])
    off = 0.0
    for index in range(1, len(got)):  # nobody uses the first one
        left = sum(left[index].double() for _, left in ranks)
        mine, want = got[index].flatten(), true[index].flatten()
        torch.testing.assert_close(mine + left, want, rtol=1e-5, atol=1e-5)
        off = max(off, float((mine - want).abs().max()))
    assert off > 1e-5  # something was left out


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("cap_bytes", CAPS)
@pytest.mark.every(5)
def test_what_is_not_finite_reaches_all_and_leaves_nothing_behind(
    codec: str, bad: float, cap_bytes: int
) -> None:
    def run(group: ThreadGroup, model: Net) -> tuple[Gradients, Any, Any, Gradients]:
        reducer = coded(model, group, codec, cap_bytes)
        trained(reducer, model, group.rank, [(4, 4, 4)] * 2)
        before = residuals(reducer)
        model.zero_grad()
        reducer.begin_step(StepPart(1 / 3, 3))
        x = batch_of(group.rank, 2, 4)
        if group.rank == 1:
            x[0, 0] = bad
        model.losses(x).mean().backward()
        reducer.end_step()
        spoilt, after = gradients_of(model), residuals(reducer)
        (then,) = trained(reducer, model, group.rank, [(4, 4, 4)])
        return spoilt, before, after, then

    ranks = on_ranks(3, run, [net() for _ in range(3)])
    for spoilt, before, after, then in ranks:
        assert any(g is not None and not g.isfinite().all() for g in spoilt)
        assert all(torch.equal(before[at], after[at]) for at in before)
        assert all(g is None or bool(g.isfinite().all()) for g in then)
        assert same(then, ranks[0][3])


def test_a_pass_that_is_sent_again_leaves_out_its_last_rounding_only() -> None:
    """A layer that gets two gradients: its bucket goes too early in the first pass."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.first = nn.Linear(4, 4)
            self.twice = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(
                    self.twice, x.tanh(), use_reentrant=True
                )
            return x.square().mean()

    def run(group: ThreadGroup, model: Twice) -> tuple[Gradients, Any]:
        reducer = coded(model, group, "int4", 1)
        reducer.begin_step(StepPart(0.5, 2))
        model(batch_of(group.rank, 0, 3)).backward()
        reducer.end_step()
        return gradients_of(model), residuals(reducer)

    ranks = on_ranks(2, run, [Twice(), Twice()])
    model = Twice()
    for rank in range(2):
        (model(batch_of(rank, 0, 3)) / 2).backward()
    assert same(ranks[0][0], ranks[1][0])
    for index, want in enumerate(gradients_of(model)):
        got = ranks[0][0][index]
        assert got is not None
        assert want is not None
        left = sum(left[index] for _, left in ranks) / 2
        torch.testing.assert_close(got.flatten() + left, want.flatten())


def test_the_state_goes_on_in_another_layout_and_group() -> None:
    """Saved under one capacity and loaded under another, residuals are the same."""

    def run(group: ThreadGroup, models: list[Net]) -> list[dict[int, torch.Tensor]]:
        first = coded(models[0], group, "int4", 1)
        trained(first, models[0], group.rank, [(4, 4, 4)] * 2)
        state = first.state_dict()
        assert state is not None
        second = coded(models[1], group, "int8", 1 << 20)
        second.load_state_dict(state)
        with pytest.raises(MismatchError, match="rank 0 cannot load its state"):
            second.load_state_dict({**state, "version": 0})
        plain = GradientReducer(list(models[1].parameters()), group, 1)  # type: ignore[arg-type]
        plain.attach()
        assert plain.state_dict() is None
        plain.load_state_dict(state)  # left out, as there is no codec
        return [residuals(first), residuals(second)]

    for before, after in on_ranks(3, run, [[net(), net()] for _ in range(3)]):
        for at, left in before.items():
            torch.testing.assert_close(after[at], left, rtol=1e-6, atol=1e-9)


def test_residuals_go_on_in_another_memory_format() -> None:
    # Once: they were saved as they lie in memory, and loaded into other elements.
    def conv(memory_format: torch.memory_format) -> nn.Module:
        torch.manual_seed(8)
        return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]

    def gradient(model: nn.Module, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(2, 3, 5, 5, generator=generator)).square().mean().backward()

    def run(group: ThreadGroup, models: list[nn.Module]) -> tuple[Gradients, Any, Any]:
        last, plain = (coded(model, group, "int4", 1) for model in models)
        last.begin_step(StepPart(0.5, 2))
        gradient(models[0], group.rank)
        last.end_step()
        state = last.state_dict()
        assert state is not None
        plain.load_state_dict(state)
        return gradients_of(models[0]), residuals(last), residuals(plain)

    formats = torch.channels_last, torch.contiguous_format
    ranks = on_ranks(2, run, [[conv(each) for each in formats] for _ in range(2)])
    model = conv(torch.contiguous_format)
    for rank in range(2):
        gradient(model, rank)
    for index, want in enumerate(gradients_of(model)):
        got = ranks[0][0][index]
        assert got is not None
        assert want is not None
        for at in (1, 2):  # as saved, and as loaded
            left = sum(rank[at][index] for rank in ranks) / 2
            assert bool(left.any())
            torch.testing.assert_close(got.flatten() + left, want.flatten() / 2)


def sent(
    group: ThreadGroup, model: nn.Linear, codec: str, own: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """A step along this gradient: the mean gradient, and bytes sent."""
    reducer = coded(model, group, codec, 1 << 20)
    reducer.begin_step(StepPart(0.5, 2))
    model.weight.grad = own.clone()
    reducer.run_without_backward()
    reducer.end_step()
    return model.weight.grad.clone(), group.sent_bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_travels_encoded(dtype: torch.dtype) -> None:
    models = [nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(2)]
    own = [torch.full((16, 16), 1.0 + rank, dtype=dtype) for rank in range(2)]
    for got, sent_bytes in on_ranks(2, sent, models, ["int8"] * 2, own):
        assert got.dtype is dtype
        torch.testing.assert_close(
            got.float(), torch.full((16, 16), 1.5), rtol=0.01, atol=0
        )
        half = CodedMessage(CODECS["int8"], range(128), exact=1)
        assert sent_bytes == 2 * half.memory.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_is_not_encoded_travels_as_it_is(dtype: torch.dtype) -> None:
    models = [nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(2)]
    own = [torch.randn(4, 4, dtype=dtype) for _ in range(2)]
    for got, sent_bytes in on_ranks(2, sent, models, ["int4"] * 2, own):
        assert sent_bytes == 0
        torch.testing.assert_close(got, (own[0] + own[1]) / 2)
