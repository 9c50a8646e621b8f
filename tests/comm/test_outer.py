"""Outer steps are those of torch's SGD, whatever parts they are taken in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.outer import OuterOptimizer, OuterStep
from elche.errors import ProtocolError
from tests.comm.plans import plan


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.floats(0.1, 2.0),
    st.floats(0.0, 0.95),
)
def test_nesterov_is_sgd_along_the_drift(
    parts: list[int], lr: float, momentum: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(sum(parts), dtype=torch.float64, generator=generator)
    reference = base.clone()
    if momentum:
        sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=True)
    else:
        sgd = torch.optim.SGD([reference], lr=lr)
    outer = OuterOptimizer(base)
    rule = OuterStep("nesterov", lr, momentum)
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


def test_average_leaves_the_momentum_alone() -> None:
    base, nesterov = torch.zeros(2), OuterStep("nesterov", 1.0, 0.5)
    outer = OuterOptimizer(base)
    outer.step(0, torch.tensor([-1.0, -2.0]), nesterov)
    assert base.tolist() == [1.5, 3.0]
    outer.step(0, torch.tensor([-1.0, 0.0]), OuterStep.of(plan(outer="average")))
    assert base.tolist() == [2.5, 3.0]
    outer.step(0, torch.tensor([0.0, 0.0]), nesterov)
    assert base.tolist() == [2.75, 3.5]


@pytest.mark.parametrize(
    ("kind", "lr", "says"),
    [("adam", 1.0, "got 'adam'"), ("average", 0.7, "outer rate 1, got 0.7")],
)
def test_other_steps_are_refused(kind: str, lr: float, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        OuterStep.of(plan(outer=kind, outer_lr=lr))
