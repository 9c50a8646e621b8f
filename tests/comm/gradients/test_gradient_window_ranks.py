"""Gradient windows between processes, through both transports."""

from __future__ import annotations

import pytest
import torch

from tests.comm.averaging.cases.overlap_cases import all_changed, joined, meeting
from tests.comm.gradients.test_gradient_window import (
    Batches,
    Net,
    made,
    on_one,
    relative,
    run,
)
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

Gradients = list[torch.Tensor | None]

WINDOWS: list[list[Batches]] = [
    [[5, 3], [2], [1, 1, 6]],
    [[4], [], [2, 2]],
    [[], [], []],
    [[], [], [7]],
]


def windows(transport: str, dtype: str) -> list[tuple[float, Gradients]]:
    """Samples and gradients of each window on this rank."""
    rank = this_place().rank
    model = Net(getattr(torch, dtype))
    seen: list[tuple[float, Gradients]] = []
    with joined(transport) as group:
        window = made(model, group)
        for batches in WINDOWS:
            run(window, model, rank, batches[rank])
            all_changed(group, ())
            samples = window.reduce()
            gradients: Gradients = [
                None if p.grad is None else p.grad.clone() for p in model.parameters()
            ]
            seen.append((samples, gradients))
            window.clear()
    return seen


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 1e-6)])
def test_windows_equal_one_process(
    ranks3: RankPool, transport: str, dtype: str, bound: float
) -> None:
    found = ranks3.run(windows, transport, dtype, case_setup=meeting)
    for number, batches in enumerate(WINDOWS):
        expected = on_one(batches, Net(getattr(torch, dtype)))
        for rank in found:
            samples, gradients = rank[number]
            assert samples == sum(map(sum, batches))
            assert [g is None for g in gradients] == [g is None for g in expected]
            assert relative(gradients, expected) <= bound
            assert relative(gradients, found[0][number][1]) == 0.0
