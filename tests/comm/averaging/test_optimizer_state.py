"""What of an optimizer's state is averaged, and how it is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging.optimizer_state import OptimizerStateAverager, forget_state
from tests.comm.bus import Bus

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


def averaged(make: Make, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """State of two ranks, of one step and of three, before and after the mean."""
    bus = Bus(2)
    ranks = [stepped(make, dtype, shape, steps) for steps in (1, 3)]
    averagers = [
        OptimizerStateAverager([parameter], lambda o=optimizer: [o], bus.group(rank))
        for rank, (parameter, optimizer) in enumerate(ranks)
    ]
    states = [optimizer.state[parameter] for parameter, optimizer in ranks]
    before = [{k: v.clone() for k, v in state.items()} for state in states]
    for averager in averagers:
        averager.begin(0.5)
    for averager in averagers:
        averager.wait()
        averager.apply()
    return before, states


def test_moments_of_complex_parameters_are_averaged() -> None:
    before, after = averaged(
        lambda p: torch.optim.Adam(p, lr=0.1), torch.complex128, (3,)
    )
    for key in ("exp_avg", "exp_avg_sq"):
        mean = (before[0][key] + before[1][key]) / 2
        for state in after:
            torch.testing.assert_close(state[key], mean)


@pytest.mark.parametrize(
    ("make", "counters"),
    [
        (lambda p: torch.optim.NAdam(p, lr=0.1), ("step", "mu_product")),
        (lambda p: torch.optim.ASGD(p, lr=0.1, t0=0), ("step", "eta", "mu")),
    ],
)
def test_what_counts_steps_stays_beside_a_parameter_without_dimensions(
    make: Make, counters: tuple[str, ...]
) -> None:
    before, after = averaged(make, torch.float64, ())
    for own, kept in zip(before, after, strict=True):
        for key in counters:
            assert torch.equal(kept[key], own[key]), key
    assert not torch.equal(before[0][counters[-1]], before[1][counters[-1]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_adagrad_goes_on_after_its_state_is_forgotten(dtype: torch.dtype) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    fresh = make([nn.Parameter(torch.ones(3, dtype=dtype))])
    (expected,) = fresh.state.values()
    for chosen in (True, False):
        parameter, optimizer = stepped(make, dtype, (3,), 2)
        forget_state(optimizer, [parameter] if chosen else None)
        assert optimizer.state[parameter].keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(optimizer.state[parameter][key], value), key
        optimizer.step()


def test_only_what_is_chosen_is_forgotten() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([one, other])
    for parameter in (one, other):
        parameter.grad = torch.ones(2)
    optimizer.step()
    forget_state(optimizer, [one])
    assert set(optimizer.state) == {other}
    forget_state(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("some", [False, True])
def test_adagrad_forgets_beside_a_group_that_was_added(some: bool) -> None:
    """It has no state before its first step, and what it begins with is torch's."""
    first, added = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([first], lr=0.1, initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": [added], "initial_accumulator_value": 7.0})
    first.grad = torch.ones(3)
    optimizer.step()
    forget_state(optimizer, [first, added] if some else None)
    assert optimizer.state[first]["sum"].eq(0.5).all()
    assert not optimizer.state.get(added)
    added.grad = torch.ones(2)
    with contextlib.suppress(KeyError):  # older torch makes no state so late
        optimizer.step()
        forget_state(optimizer, [first, added] if some else None)
        assert optimizer.state[added]["sum"].eq(0.5).all()


def test_ranks_may_see_optimizers_in_another_order() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizers = [torch.optim.Adam([each], lr=0.1) for each in parameters]
    both = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizers.append(both)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    layouts = []
    for order in (optimizers, [optimizers[1], optimizers[0], both], optimizers[:2]):
        group = Bus(1).group(0)
        averager = OptimizerStateAverager(parameters, lambda o=order: o, group)
        if not layouts:
            assert averager.layout() == ""
            for each in optimizers:
                each.step()
        layouts.append(averager.layout())
    assert layouts[0] == layouts[1] != layouts[2]
