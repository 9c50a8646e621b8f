"""A rank's own gradients and its parameters are looked at without waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elche.coordination.step_numbers import OwnNumbers
from elche.runtime.number_watch import NumberWatch

NAN = float("nan")


class Slow:
    """A copy that has come when the test says so."""

    come = False

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def is_done(self) -> bool:
        return self.come

    def values(self) -> list[float]:
        values: list[float] = self._values.tolist()
        return values


def model_of(kind: str) -> list[nn.Parameter]:
    """Parameters of which the first that is looked at is not the first of all."""
    if kind == "large":
        return [nn.Parameter(torch.ones(100, 100)), nn.Parameter(torch.ones(5000))]
    dtype = {"half": torch.float16, "complex": torch.complex64}.get(kind)
    unused = nn.Parameter(torch.full((3,), NAN))
    return [unused, nn.Parameter(torch.ones(4, dtype=dtype))]


@pytest.mark.parametrize("kind", ["plain", "large", "half", "complex"])
@pytest.mark.parametrize("defers", [False, True])
def test_what_is_none_is_told_in_order(kind: str, defers: bool) -> None:
    numbers, parameters = OwnNumbers(), model_of(kind)
    watch = NumberWatch(parameters, numbers, Slow if defers else None)
    used = parameters[0] if kind == "large" else parameters[1]
    Slow.come = False

    def step(number: int, value: float) -> None:
        watch.begin_step((number, 0, 4))
        used.grad = torch.full_like(used, value)
        watch.look()
        watch.report(final=False)

    # In half precision a sum of large gradients overflows where none of them does.
    step(0, 60000.0)
    step(1, NAN)
    step(2, 1.0)
    step(3, float("inf"))
    with torch.no_grad():
        used.fill_(NAN)
    step(4, NAN)
    assert (numbers.broken, numbers.is_finite) == (
        ((), True) if defers else ((3, 0, 4), False)
    )
    Slow.come = True
    watch.report(final=False)
    assert (numbers.broken, numbers.is_finite) == ((3, 0, 4), False)


def test_a_part_that_does_not_count_is_not_looked_at() -> None:
    numbers, (parameter,) = OwnNumbers(), [nn.Parameter(torch.ones(2))]
    watch = NumberWatch([parameter], numbers)
    parameter.grad = torch.full((2,), NAN)
    watch.begin_step(())
    watch.look()
    watch.report(final=True)
    assert (numbers.broken, numbers.is_finite) == ((), True)
