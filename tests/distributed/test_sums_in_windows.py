"""A loss that is a sum over the batch, under windows, whose batches are smaller."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.session.process import failing_together
from tests.distributed.cases.tasks import Task, build, difference, identical, state_of
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

BATCH = 8


def train(policy: str, reduction: str) -> dict[str, torch.Tensor]:
    """Parameters after two epochs, at the same step length for sum and mean."""
    task = Task(samples=12 * BATCH, batch_size=BATCH)
    model, _, loader = build(task)
    is_sum = reduction == "sum"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (BATCH if is_sum else 1))
    options = nested(
        {
            "policy": policy,
            "deterministic": True,
            "max_anchor": 0,
            "loss_reduction": reduction,
        }
    )
    with failing_together():
        model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
        for _ in range(2):
            for x, y, _, _ in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y, reduction=reduction).backward()
                optimizer.step()
    elche.shutdown()
    return state_of(model)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_local_step_is_as_long_as_one_devices(ranks2: RankPool, policy: str) -> None:
    # Once: a sum over half of the batch, averaged, made half of the step.
    means = ranks2.serve(train, policy, "mean")
    sums = ranks2.serve(train, policy, "sum")
    assert identical(means)
    assert identical(sums)
    assert difference(sums[0], means[0]) < 1e-6
