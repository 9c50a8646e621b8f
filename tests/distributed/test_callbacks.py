"""Errors in a Trainer's callbacks: a checkpoint's is logged, others end the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.coordination import policy as core_policy
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

SAMPLES, EPOCHS = 96, 2


DATA = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))


def _train(**options: Any) -> elche.TrainResult:
    return elche.Trainer(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-30),
        lambda model, batch: (model(batch[0]) * 0.0 + batch[0]).mean(),
        dataset=DATA,
        batch_size=8,
        epochs=EPOCHS,
        **options,
    ).fit()


def _fit(policy: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a fault in a callback")

    _train(policy=policy, on_epoch_end=fail)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_callback_that_raises_ends_the_run_on_every_rank(
    ranks2: RankPool, policy: str
) -> None:
    first, second = ranks2.run(
        _fit, policy, case_setup=serve_in_thread, expect_failure=True
    )
    assert "ValueError: a fault in a callback" in str(first.error)
    assert "RemoteRankError: rank 0 failed: ValueError" in str(second.error)


def _fit_saving() -> tuple[list[int], list[str]]:
    """Epochs whose model was handed out, and what was logged of a failure."""
    saved: list[int] = []

    def save(epoch: int, state: dict[str, torch.Tensor]) -> None:
        assert state["weight"].device.type == "cpu"
        saved.append(epoch)
        raise OSError("no space left")

    with logged("elche", logging.ERROR) as lines:
        _train(on_checkpoint=save)
    return saved, lines


def test_a_checkpoint_that_raises_costs_no_run(ranks2: RankPool) -> None:
    first, second = ranks2.serve(_fit_saving)
    assert first[0] == [*range(EPOCHS)]
    assert first[1] == [
        f"on_checkpoint failed after epoch {epoch}; training continues"
        for epoch in range(EPOCHS)
    ]
    assert second == ([], [])


def _fit_and_evaluate() -> tuple[list[Any], Any, float]:
    """History, the metrics of the last epoch, and the loss on other data."""
    result = _train(policy="cadence", eval_dataset=DATA)
    report = result.report
    assert report.samples == SAMPLES * EPOCHS
    return result.history, elche.epoch_metrics(), sum(report.busy_s)


def test_in_a_run_of_many_ranks_only_the_first_holds_numbers_per_rank(
    ranks2: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks for many: everything else, evaluation too, is as before."""
    monkeypatch.setattr(core_policy, "TABLE_RANKS", 1)
    first, second = ranks2.serve(_fit_and_evaluate)
    for mine, other in zip(first[0], second[0], strict=True):
        assert mine.eval_loss == other.eval_loss == pytest.approx((SAMPLES - 1) / 2)
        assert mine.train_loss == other.train_loss
        assert mine.samples == other.samples == SAMPLES
        assert (len(mine.shares), other.shares) == (2, (1.0,))
    assert second[1] == first[1].totals()
    assert second[1] != first[1]
    assert second[2] == pytest.approx(first[2])
