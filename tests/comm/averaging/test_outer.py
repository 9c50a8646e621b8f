"""Outer steps are those of torch's SGD, whatever parts they are taken in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.averaging.outer import OuterOptimizer, OuterStep
from elche.comm.averaging.parameter_group import ParameterGroup
from tests.comm.plans import plan
from tests.comm.thread_group import ThreadGroup, on_ranks


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.floats(0.1, 2.0),
    st.floats(0.0, 0.95),
    st.sampled_from(["nesterov", "slowmo"]),
)
def test_momentum_is_sgd_along_the_drift(
    parts: list[int], lr: float, momentum: float, kind: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(sum(parts), dtype=torch.float64, generator=generator)
    reference = base.clone()
    if momentum:
        nesterov = kind == "nesterov"
        sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=nesterov)
    else:
        sgd = torch.optim.SGD([reference], lr=lr)
    outer = OuterOptimizer(base)
    rule = OuterStep(kind, lr, momentum)
    for _ in range(4):
        drift = torch.randn(len(base), dtype=torch.float64, generator=generator)
        reference.grad = drift.clone()
        sgd.step()
        start = 0
        for part in drift.split(parts):
            before = base[start : start + len(part)].clone()
            outer.step(start, part, rule)
            moved = base[start : start + len(part)]
            torch.testing.assert_close(moved, before - lr * part)
            start += len(part)
    torch.testing.assert_close(base, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["nesterov", "slowmo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_momentum_and_at_rate_one_it_is_the_average(
    kind: str, dtype: torch.dtype
) -> None:
    """To the bit, whatever was averaged before."""
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(1000, dtype=dtype, generator=generator)
    outer, plain = OuterOptimizer(base.clone()), OuterOptimizer(base.clone())
    for _ in range(3):
        drift = torch.randn(1000, dtype=dtype, generator=generator)
        outer.step(0, drift.clone(), OuterStep(kind, 1.0, 0.0))
        plain.step(0, drift.clone(), OuterStep("average", 1.0, 0.5))
        assert torch.equal(outer._base, plain._base)
    assert not torch.equal(outer._base, base)


def test_average_leaves_the_momentum_alone() -> None:
    base, nesterov = torch.zeros(2), OuterStep("nesterov", 1.0, 0.5)
    outer = OuterOptimizer(base)
    outer.step(0, torch.tensor([-1.0, -2.0]), nesterov)
    assert base.tolist() == [1.5, 3.0]
    outer.step(0, torch.tensor([-1.0, 0.0]), OuterStep.of(plan(outer="average")))
    assert base.tolist() == [2.5, 3.0]
    outer.step(0, torch.tensor([0.0, 0.0]), nesterov)
    assert base.tolist() == [2.75, 3.5]


@pytest.mark.parametrize("momentum", [0.5, 0.8, 0.9, 0.99])
def test_a_constant_drift_is_not_held_back_by_rounding(momentum: float) -> None:
    """Its momentum comes near drift / (1 − momentum); a loaded one keeps its dtype."""
    base = torch.zeros(64)
    outer, rule = OuterOptimizer(base), OuterStep("slowmo", 1.0, momentum)
    drift = torch.linspace(0.1, 0.9, 64)
    for _ in range(2000):
        outer.step(0, drift.clone(), rule)
    assert outer.momentum is not None
    is_rounded = momentum <= 0.8
    assert outer.momentum.dtype is (torch.bfloat16 if is_rounded else torch.float32)
    wanted = drift / (1 - momentum)
    torch.testing.assert_close(outer.momentum.float(), wanted, rtol=0.02, atol=0)
    other = OuterOptimizer(base.clone())
    other.load_momentum(outer.momentum)
    assert other.momentum is not None
    assert other.momentum.dtype is other.dtype_at(0.5) is outer.momentum.dtype


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_who_lacks_the_first_momentum_receives_it(momentum: float) -> None:
    """It has made no step, so it learns the dtype from the rule."""
    rule = OuterStep("slowmo", 1.0, momentum)

    def run(group: ThreadGroup, parameter: nn.Parameter) -> torch.Tensor:
        group_of = ParameterGroup([parameter], torch.float32, is_overlapped=False)
        if group.rank == 0:
            group_of._outer.step(0, torch.arange(1.0, 9.0), rule)
        lacks = group.rank == 1
        _, found = group_of.receive(group, 0, rule, lacks=lacks)
        assert found is not None
        return found

    made = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    first, second = on_ranks(2, run, made)
    assert first.dtype is second.dtype
    assert first.tolist() == second.tolist() == list(range(1, 9))
