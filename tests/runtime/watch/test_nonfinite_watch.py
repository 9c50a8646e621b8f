"""A rank's own gradients and its parameters are looked at without waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.runtime.report.scalars import Readback
from elche.runtime.watch import nonfinite_watch
from elche.runtime.watch.nonfinite_watch import NonFiniteWatch

NAN = float("nan")


class Slow(Readback):
    """A copy that has come when the test says so."""

    come = False

    def is_done(self) -> bool:
        return self.come


def model_of(kind: str) -> list[nn.Parameter]:
    """Parameters of which the second is looked at, but where all are large."""
    if kind == "large":
        return [nn.Parameter(torch.ones(100, 100)), nn.Parameter(torch.ones(5000))]
    dtype = {"half": torch.float16, "complex": torch.complex64}.get(kind)
    others = nn.Parameter(torch.full((5000,), NAN)), nn.Parameter(torch.ones(0))
    return [others[0], nn.Parameter(torch.ones(4, dtype=dtype)), others[1]]


@pytest.mark.parametrize("kind", ["plain", "large", "half", "complex"])
@pytest.mark.parametrize("defers", [False, True])
def test_what_is_none_is_told_in_order(
    kind: str, defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, parameters = NonFiniteRecord(), model_of(kind)
    watch = NonFiniteWatch(parameters, numbers)
    used = parameters[0] if kind == "large" else parameters[1]
    came = dict.fromkeys([0] if kind == "large" else [2, 1, 0], 1)
    monkeypatch.setattr(nonfinite_watch, "Readback", Slow)
    monkeypatch.setattr(Slow, "come", not defers)

    def step(number: int, value: float) -> None:
        used.grad = torch.full_like(used, value)
        watch.look((2, number, 0, 4), came)
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
        ((), True) if defers else ((2, 3, 0, 0, 4), False)
    )
    monkeypatch.setattr(Slow, "come", True)
    watch.report(final=False)
    assert (numbers.broken, numbers.is_finite) == ((2, 3, 0, 0, 4), False)


def test_a_part_that_does_not_count_is_not_looked_at() -> None:
    numbers, (parameter,) = NonFiniteRecord(), [nn.Parameter(torch.ones(2))]
    watch = NonFiniteWatch([parameter], numbers)
    parameter.grad = torch.full((2,), NAN)
    watch.look((), {0: 1})
    watch.report(final=True)
    assert (numbers.broken, numbers.is_finite) == ((), True)


def test_passes_of_a_step_and_parts_of_a_model_are_told_apart() -> None:
    numbers, parameters = (
        NonFiniteRecord(),
        [nn.Parameter(torch.ones(2)) for _ in range(4)],
    )
    watch = NonFiniteWatch(parameters, numbers)

    def look(step: int, came: list[int], values: list[float]) -> None:
        for index, value in zip(came, values, strict=True):
            parameters[index].grad = torch.full((2,), value)
        watch.look((2, step, 0, 4), dict.fromkeys(came, 1))
        watch.report(final=True)

    look(5, [1, 0], [1.0, 1.0])
    look(5, [3, 2], [1.0, NAN])
    assert numbers.broken == (2, 5, 1, 0, 4)
    look(6, [1, 0], [NAN, 1.0])
    assert numbers.broken == (2, 5, 1, 0, 4)
    look(6, [3, 2], [1.0, 1.0])
    assert numbers.broken == (2, 6, 0, 0, 4)
    look(7, [1, 0], [1.0, 1.0])
    assert (numbers.broken, numbers.is_finite) == ((), True)
    with torch.no_grad():
        parameters[1].fill_(NAN)
    watch.report(final=False)  # no pass came since
    assert not numbers.is_finite
