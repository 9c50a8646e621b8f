"""What averaging moves: the model once, a weight, and hardly anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from tests.comm.joined import joined, meeting
from tests.comm.plans import plan
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

WINDOWS = 3
ALLOWED = 1.10
"""Of what a raw all-reduce of one flat tensor would move."""


def _moved(is_overlapped: bool) -> tuple[list[int], int]:
    """Bytes that a window hands to the transport, and those of the model."""
    torch.manual_seed(0)
    place, moved = this_place(), []
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(30)), nn.BatchNorm1d(20))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handed = [0]
    with joined("gloo") as group:
        begin = group.all_reduce_async

        def counting(tensor: torch.Tensor) -> Any:
            handed[0] += tensor.numel() * tensor.element_size()
            return begin(tensor)

        group.all_reduce_async = counting  # type: ignore[method-assign]
        kind = OverlappedAverager if is_overlapped else ParameterAverager
        parameters = list(model.parameters())
        averager: Any = kind(parameters, model, lambda: [optimizer], group)
        averager.build()
        for window in range(WINDOWS):
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            before = handed[0]
            reduction = plan(
                place.rank,
                window=window,
                weight=1 / place.world_size,
                active_ranks=place.world_size,
            )
            if is_overlapped:
                averager.snapshot(1 / place.world_size)
                averager.begin(reduction)
                averager.adopt(reduction)
            else:
                averager.synchronise(reduction)
            moved.append(handed[0] - before)
    return moved, 4 * numel


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_window_moves_the_model_once(ranks2: RankPool, is_overlapped: bool) -> None:
    """Counted as handed to all-reduce, which moves 2 (n - 1) / n times as much."""
    for moved, model_bytes in ranks2.run(_moved, is_overlapped, case_setup=meeting):
        for each in moved:
            assert model_bytes < each <= ALLOWED * model_bytes
