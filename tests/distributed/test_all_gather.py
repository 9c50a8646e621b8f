"""`elche.all_gather` in a user's loop: a loss over all pairs of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.errors import ElcheError
from elche.session.process import failing_together
from tests.distributed.cases.tasks import (
    Task,
    begin,
    build,
    difference,
    identical,
    state_of,
)
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=49, batch_size=16, dtype="float64")
"""The last batch has one sample: of two ranks one gets none."""


def pair_loss(
    own: torch.Tensor, own_labels: torch.Tensor, *others: torch.Tensor, how: str
) -> torch.Tensor:
    """Rows of one label are to be alike; the mean over some rows, or the sum."""
    rows, labels = others
    alike = 2.0 * (own_labels[:, None] == labels[None, :]) - 1.0
    similarity = F.normalize(own, dim=1) @ F.normalize(rows, dim=1).T
    loss = (alike - similarity).square().mean(1)
    return loss.mean() if how == "mean" else loss.sum()


def weigh(batch: Any) -> torch.Tensor:
    """Never 0: such a batch would count nowhere."""
    total: torch.Tensor = 1 + batch[1].sum()
    return total


def train(is_own: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer, loader = begin(TASK, **options)
    how = options.get("loss_reduction", "mean")
    for _ in range(2):
        for x, y, *_ in loader:
            out = model(x)
            rows, labels = elche.all_gather(out), elche.all_gather(y)
            mine = (out, y) if is_own else (rows, labels)
            pair_loss(*mine, rows, labels, how=how).backward()
            optimizer.step()
            optimizer.zero_grad()
    elche.shutdown()
    return state_of(model)


@pytest.mark.parametrize(
    ("is_own", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"weight_of": weigh}),
        (True, {"loss_reduction": "sum"}),
    ],
    ids=["all rows", "own rows", "weights", "sum"],
)
@pytest.mark.usefixtures("plain_environment")
def test_a_loss_over_pairs_is_one_process_loss(
    ranks2: RankPool, is_own: bool, options: dict[str, Any]
) -> None:
    alone = train(is_own, options)
    states = ranks2.serve(train, is_own, options, env=FOUR_TO_ONE)
    assert identical(states)
    assert difference(states[0], alone) <= 1e-12


def outside(policy: str) -> list[str]:
    """Between epochs it gathers; in windows, after a lone break, without a run not."""
    said: list[str] = []
    task = Task(samples=96, batch_size=8)
    try:
        elche.all_gather(torch.ones(1))
    except ElcheError as error:
        said.append(str(error))
    try:
        with failing_together():
            model, optimizer, loader = begin(task, policy=policy)
            rank = elche.rank()
            rows = elche.all_gather(torch.full((rank + 1,), float(rank)))
            said.append(str(rows.tolist()))
            for number, (x, *_) in enumerate(loader):
                elche.all_gather(model(x)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0 and number == 2:
                    break
            elche.barrier()
    except ElcheError as error:
        said.append(str(error))
    elche.shutdown()
    return said


def test_where_it_cannot_gather_it_says_so(ranks2: RankPool) -> None:
    for said in ranks2.serve(outside, "async"):
        assert "needs a run" in said[0]
        assert said[1] == "[0.0, 1.0, 1.0]"
        assert "elche.all_gather inside the loop would wait for ever" in said[2]
    for said in ranks2.serve(outside, "sync"):
        assert "rank 0 left epoch 0 after step 3, and rank 1 did not" in said[2]
        assert "elche.all_gather needs every rank's forward pass" in said[2]


def by_hand() -> list[torch.Tensor]:
    """Losses of unequal batches, weighted as their gradients are reduced."""
    model, _, loader = build(TASK)
    replica = elche.Replica.wrap(model, elche.init_group())
    data: Any = loader.dataset
    cut = slice(0, 5) if elche.rank() == 0 else slice(5, 16)
    if elche.world_size() == 1:
        cut = slice(0, 16)
    x, y = data.x[cut], data.y[cut]
    rows, labels = elche.all_gather(model(x), weight=len(x)), elche.all_gather(y)
    pair_loss(rows, labels, rows, labels, how="mean").backward()
    replica.weighted_all_reduce_gradients(len(x))
    elche.shutdown()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("plain_environment")
def test_by_hand_it_follows_the_weight_that_is_given(ranks2: RankPool) -> None:
    alone = by_hand()
    for found in ranks2.serve(by_hand):
        for own, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)
