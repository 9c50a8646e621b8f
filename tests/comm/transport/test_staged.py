"""Tensors that are copied as a whole, as from a CUDA device, through a stand-in.

The stand-in copies when a real stream would at the latest, so an image that is used
before it is settled, or memory that is written while it is read, gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from elche.comm.tensors import flat
from tests.comm.averaging.cases.overlap_cases import (
    Script,
    averager_of,
    build,
    local_step,
    simulate,
)
from tests.comm.bus import Bus
from tests.comm.plans import plan


class LateStage:
    """A device in this process whose copies to the host end when waited for."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        self._flat = torch.empty(numel, dtype=dtype)
        self._views = flat.shaped(self._flat, tensors)
        self._under_way: torch.Tensor | None = None

    def host_memory(self) -> torch.Tensor:
        return torch.full_like(self._flat, float("nan"))

    def fetch(self, tensors: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        self.settle()
        torch._foreach_copy_(self._views, list(tensors))
        self._under_way = host.fill_(float("nan"))

    def settle(self) -> None:
        if self._under_way is not None:
            self._under_way.copy_(self._flat)
            self._under_way = None

    def put(self, host: torch.Tensor) -> list[torch.Tensor]:
        self.settle()
        self._flat.copy_(host)
        return self._views


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat.CudaStage, "for_tensors", LateStage)


def assert_state(
    model: torch.nn.Module, expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            value, expected[name], rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize(
    ("model", "tolerance"), [("norm", 1e-12), ("tied", 1e-5), ("half", 2e-2)]
)
def test_overlapped(model: str, tolerance: float) -> None:
    script = Script(
        lag=(2, 1),
        weights=((0.5, 0.5), (1.0, 0.0), (0.5, 0.5)),
        model=model,
        outer="nesterov",
    )
    models = [build(script) for _ in range(2)]
    averagers = [
        averager_of(each, group)
        for each, group in zip(models, Bus(2).groups(), strict=True)
    ]
    begun = [0, 0]
    known = simulate(script)
    for window in range(3):
        changed: set[int] = set()
        for rank, averager in enumerate(averagers):
            for number in script.steps_of(rank, window)[begun[rank] :]:
                local_step(models[rank], rank, number)
            assert averager.snapshot(script.weights[window][rank])
            changed.update(averager.changed_buffers())
        plans = [script.plan(rank, window, sorted(changed)) for rank in range(2)]
        for rank, averager in enumerate(averagers):
            begun[rank] = script.lag_of(rank, window)
            if window < 2:
                for number in script.steps_of(rank, window + 1)[: begun[rank]]:
                    local_step(models[rank], rank, number)
            averager.begin(plans[rank])
        for rank, averager in enumerate(averagers):
            result = averager.adopt(plans[rank], drained=window == 2)
            expected = known[rank].divergences[window]
            assert result.divergence == pytest.approx(expected, rel=tolerance)
    for rank in range(2):
        assert_state(models[rank], known[rank].state, tolerance)


def test_a_rank_that_is_no_number_comes_back() -> None:
    """It weighs nothing, and takes what the others have."""
    script = Script()
    models = [build(script) for _ in range(2)]
    averagers = [
        averager_of(each, group)
        for each, group in zip(models, Bus(2).groups(), strict=True)
    ]
    with torch.no_grad():
        next(iter(models[1].parameters())).fill_(float("nan"))
        next(iter(models[0].parameters())).add_(1.0)
    found = [averager.snapshot(1.0) for averager in averagers]
    assert found == [True, False]
    for weight, averager in zip((1.0, 0.0), averagers, strict=True):
        averager.begin(plan(weight=weight, active_ranks=1))
    results = [
        averager.adopt(plan(weight=weight, active_ranks=1))
        for weight, averager in zip((1.0, 0.0), averagers, strict=True)
    ]
    assert results[0].divergence < 1e-12
    assert results[1].divergence != results[1].divergence
    assert_state(models[1], dict(models[0].state_dict()), 1e-12)
