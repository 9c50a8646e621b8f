"""How an optimizer's state is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import forget_state

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def stepped(make: Make, dtype: torch.dtype, shape: tuple[int, ...], steps: int) -> Any:
    """An optimizer of one parameter after some steps along its own gradients."""
    torch.manual_seed(steps)
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.randn(shape, dtype=dtype)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_adagrad_goes_on_after_its_state_is_forgotten(dtype: torch.dtype) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    fresh = make([nn.Parameter(torch.ones(3, dtype=dtype))])
    (expected,) = fresh.state.values()
    parameter, optimizer = stepped(make, dtype, (3,), 2)
    forget_state(optimizer)
    assert optimizer.state[parameter].keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(optimizer.state[parameter][key], value), key
    optimizer.step()


def test_all_is_forgotten() -> None:
    _, optimizer = stepped(torch.optim.Adam, torch.float32, (2,), 1)
    assert optimizer.state
    forget_state(optimizer)
    assert not optimizer.state


def test_adagrad_forgets_beside_a_group_that_was_added() -> None:
    """It has no state before its first step, and what it begins with is torch's."""
    first, added = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([first], lr=0.1, initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": [added], "initial_accumulator_value": 7.0})
    first.grad = torch.ones(3)
    optimizer.step()
    forget_state(optimizer)
    assert optimizer.state[first]["sum"].eq(0.5).all()
    assert not optimizer.state.get(added)
    added.grad = torch.ones(2)
    with contextlib.suppress(KeyError):  # older torch makes no state so late
        optimizer.step()
        forget_state(optimizer)
        assert optimizer.state[added]["sum"].eq(0.5).all()
