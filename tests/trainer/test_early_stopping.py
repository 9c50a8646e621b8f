"""Early stopping: when it stops, and which model it keeps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import ConfigError
from elche.trainer import EarlyStopping
from elche.trainer.fitting import TrainedEpochs

pytestmark = pytest.mark.usefixtures("plain_environment")

LOSSES = st.lists(
    st.floats(-4.0, 4.0) | st.sampled_from([math.nan, math.inf]), max_size=12
)


def record_of(value: float) -> Any:
    return SimpleNamespace(train_loss=value, eval_loss=None, scalars={"accuracy": 0.5})


@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 0.5]), st.booleans())
def test_it_ends_after_so_many_epochs_without_a_better_one(
    losses: list[float], patience: int, min_delta: float, is_max: bool
) -> None:
    mode: Any = "max" if is_max else "min"
    config = EarlyStopping(
        metric="train_loss", patience=patience, min_delta=min_delta, mode=mode
    )
    settings: Any = SimpleNamespace(early_stopping=config)
    best, sign = TrainedEpochs(settings), -1.0 if is_max else 1.0
    improved: list[int] = []
    for epoch, loss in enumerate(losses):
        ends = best.judge(record_of(sign * loss), lambda epoch=epoch: {"at": epoch})
        kept = losses[improved[-1]] if improved else None
        if not math.isnan(loss) and (kept is None or kept - loss > min_delta):
            improved.append(epoch)
        assert ends == (epoch - (improved[-1] if improved else -1) >= patience)
        if ends:
            break
    if improved:
        assert best.best_metric == sign * losses[improved[-1]]
        assert best.best_state == {"at": improved[-1]}
    else:
        assert best.best_metric is best.best_state is None


def fit(losses: list[float], **options: Any) -> elche.trainer.TrainResult:
    """Epochs whose evaluation brings these losses, one after the other."""
    data = TensorDataset(torch.zeros(2, 1))
    left = iter(losses)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            elche.log_scalar("accuracy", 0.5)
            out: torch.Tensor = model(batch[0]).mean()
            return out
        return torch.tensor(next(left))

    return elche.Trainer(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        loss,
        **{"eval_dataset": data, **options},
        dataset=data,
        batch_size=2,
        epochs=len(losses),
    ).fit()


def test_the_best_model_is_kept() -> None:
    result = fit([3.0, 1.0, 2.0, 1.0, 0.0], early_stopping=EarlyStopping(patience=2))
    assert (result.stopped_by, result.best_metric) == ("early stopping", 1.0)
    assert [record.eval_loss for record in result.history] == [3.0, 1.0, 2.0, 1.0]
    assert result.best_state is not None
    moved = result.best_state["bias"] - result.model_state["bias"]
    assert moved.item() == pytest.approx(2.0)  # two steps of one each


def test_a_run_that_ends_anyway_was_not_stopped() -> None:
    result = fit([1.0, 2.0], early_stopping=EarlyStopping(patience=1))
    assert (len(result.history), result.stopped_by) == (2, None)
    assert fit([1.0]).best_state is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EarlyStopping(mode="less"), "unknown mode .less.; expected"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(patience=0), "expected patience to be an int >= 1"),
        (
            lambda: EarlyStopping(min_delta=-1.0),
            "expected min_delta to be a finite",
        ),
        (lambda: fit([1.0], early_stopping=3), "expected early_stopping to be an"),
        (
            lambda: fit([1.0], early_stopping=EarlyStopping(metric="f1")),
            r"watches 'f1', and the epoch has only \['accuracy', 'loss', 'train_loss'",
        ),
        (
            lambda: fit([1.0], early_stopping=EarlyStopping(), eval_dataset=None),
            "there is no eval_dataset",
        ),
    ],
)
def test_wrong_ones(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
