"""The Trainer on one device: records, callbacks, checkpoints, learning rates."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.config import RunConfig
from elche.config_parts import WindowConfig
from elche.errors import ConfigError
from elche.trainer.trainer_config import EpochRecord, TrainerConfig, trainer_config
from tests.harness.settings import nested

pytestmark = pytest.mark.usefixtures("plain_environment")

DATA = TensorDataset(torch.arange(10.0).reshape(10, 1), torch.zeros(10, 1))


def ones() -> nn.Module:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Kept:
    """Keeps the optimizer that a trainer makes, and the rate of each step."""

    def __init__(self, lr: float = 0.0) -> None:
        self.lr = lr
        self.rates: list[float] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(parameters, lr=self.lr)
        self.optimizer.register_step_pre_hook(self._note)
        return self.optimizer

    def _note(self, optimizer: Any, *_: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def trainer(
    loss: Callable[..., Any] | None = None,
    optimizer: Kept | None = None,
    **options: Any,
) -> elche.Trainer:
    given = {"dataset": DATA, "batch_size": 4, "epochs": 2, "shuffle": False} | options
    return elche.Trainer(ones, optimizer or Kept(), loss or nn.L1Loss(), **given)


def with_scalar(model: nn.Module, batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch[0]).mean()
    elche.log_scalar("first", batch[0][0, 0])
    elche.log_scalar("twice", 2.0 * out)
    return out


def test_a_record_of_an_epoch() -> None:
    records: list[EpochRecord] = []
    result = trainer(with_scalar, on_epoch_end=records.append).fit()
    assert result.history == records
    assert [record.epoch for record in records] == [0, 1]
    for record in records:
        assert record.train_loss == record.scalars["loss"] == 4.5
        assert record.scalars["twice"] == 9.0
        assert record.scalars["first"] == pytest.approx((0 * 4 + 4 * 4 + 8 * 2) / 10)
        assert (record.samples, record.shares) == (10, (1.0,))
        assert record.samples_per_s == pytest.approx(10 / record.duration_s)
        assert 0.0 < record.data_wait_s[0] < record.busy_s[0] <= record.duration_s
        assert (record.transfer_s, record.sync_wait_s) == ((0.0,), (0.0,))
    report = result.report
    assert report.samples == 20
    assert report.busy_s == (sum(record.busy_s[0] for record in records),)
    assert report.data_wait_s == (sum(record.data_wait_s[0] for record in records),)


def test_evaluation_is_not_in_the_scalars() -> None:
    """A loss function that logs is evaluated with as well."""
    other = TensorDataset(torch.full((6, 1), 100.0), torch.zeros(6, 1))
    result = trainer(with_scalar, eval_dataset=other).fit()
    assert [record.eval_loss for record in result.history] == [100.0, 100.0]
    assert [record.scalars["twice"] for record in result.history] == [9.0, 9.0]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_evaluation_is_a_mean_whatever_the_loss_adds_up(
    reduction: str, weighs: bool
) -> None:
    """Over batches of other sizes, or other weights; the model hands its input on."""
    values = torch.arange(6.0).reshape(6, 1)
    expected = float((values * (1 + values)).sum() / (1 + values).sum())
    weigh = (lambda x: 1 + x) if weighs else torch.ones_like

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        total: torch.Tensor = (model(x) * weigh(x)).sum()
        return total if reduction == "sum" else total / weigh(x).sum()

    result = trainer(
        loss,
        eval_dataset=TensorDataset(values),
        eval_batch_size=4,
        epochs=1,
        loss_reduction=reduction,
        weight_of=(lambda batch: weigh(batch[0]).sum()) if weighs else None,
    ).fit()
    assert result.history[0].eval_loss == pytest.approx(expected if weighs else 2.5)


def test_a_loss_that_is_not_finite_shows() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0]).mean()
        return out * math.inf if batch[0][0, 0] == 8.0 else out

    record = trainer(broken, epochs=1).fit().history[0]
    assert math.isnan(record.train_loss)
    assert record.scalars == {"loss": 3.5}


def test_the_name_of_the_loss_is_taken() -> None:
    def logs(model: nn.Module, batch: Any) -> torch.Tensor:
        elche.log_scalar("loss", 1.0)
        out: torch.Tensor = model(batch[0]).mean()
        return out

    with pytest.raises(ConfigError, match="the Trainer itself logs 'loss'"):
        trainer(logs).fit()


def test_the_callback_comes_in_the_training_thread() -> None:
    threads = []
    trainer(on_epoch_end=lambda _: threads.append(threading.current_thread())).fit()
    assert threads == [threading.current_thread()] * 2
    assert [metrics.samples for metrics in elche.metrics()] == [10, 10]
    assert elche.epoch_metrics().epoch == 1


def config(**options: Any) -> TrainerConfig:
    given = {"dataset": DATA, "batch_size": 4, "epochs": 1} | options
    return trainer_config(nested(given))


def test_all_optimizers_of_a_list_step_by_the_schedule() -> None:
    kept = Kept(lr=0.5), Kept(lr=0.25)

    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        return [each([p]) for each, p in zip(kept, parameters, strict=True)]

    given = {"dataset": DATA, "batch_size": 4, "epochs": 2, "lr_scale": 3.0}
    model = elche.Trainer(ones, both, nn.L1Loss(), **given, lr_schedule=lambda p: 1 - p)
    state = model.fit().model_state
    for each in kept:
        progress = [0.0, 0.2, 0.4, 0.5, 0.7, 0.9]
        assert each.rates == pytest.approx([3 * each.lr * (1 - p) for p in progress])
    assert state["weight"] != 1.0
    assert state["bias"] != 0.0


def test_without_a_schedule_the_rate_is_the_users_to_change() -> None:
    kept = Kept(lr=0.5)

    def halve(record: EpochRecord) -> None:
        kept.optimizer.param_groups[0]["lr"] /= 2

    trainer(optimizer=kept, lr_scale=3.0, on_epoch_end=halve).fit()
    assert kept.rates == [1.5] * 3 + [0.75] * 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_scale": "linear"}, "expected lr_scale to be a positive finite number"),
        ({"lr_scale": 0.0}, r"expected lr_scale to be a positive .*, got 0\.0"),
        ({"checkpoint_every_epochs": 2}, "was removed: on_checkpoint= is called at"),
        ({"on_checkpoint": 3}, "expected on_checkpoint to be callable, got 3"),
        ({"resume": True}, "resume=True needs checkpoint_dir"),
        ({"max_grad_norm": 0}, "expected max_grad_norm to be a positive finite"),
        ({"on_window_end": print}, "on_window_end= was removed: elche.metrics()"),
        ({"on_epoch_end": 3}, "expected on_epoch_end to be callable, got 3"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**options)


def test_clipping_is_said_once_for_loop_and_windows() -> None:
    """Where a window sums gradients the run clips, elsewhere the loop does."""
    sums = {"policy": "cadence", "windows": {"update": "gradients"}}
    for given in (
        config(max_grad_norm=0.5, **sums),
        config(max_grad_norm=0.5, config=RunConfig(**sums)),
        config(**{**sums, "windows": {**sums["windows"], "max_grad_norm": 0.5}}),
    ):
        assert given.max_grad_norm == given.run.windows.max_grad_norm == 0.5
    for given in (config(max_grad_norm=0.5), config(max_grad_norm=0.5, policy="async")):
        assert given.max_grad_norm == 0.5
        assert given.run.windows == WindowConfig()
    assert config().max_grad_norm is None


@pytest.mark.parametrize("options", [{}, {"policy": "cadence", "update": "gradients"}])
def test_one_device_clips_under_every_policy(options: dict[str, Any]) -> None:
    result = trainer(
        nn.MSELoss(),
        Kept(lr=1.0),
        epochs=1,
        batch_size=10,
        max_grad_norm=0.5,
        **nested(options),
    ).fit()
    moved = [
        result.model_state["weight"].item() - 1.0,
        result.model_state["bias"].item(),
    ]
    assert math.hypot(*moved) == pytest.approx(0.5, rel=1e-3)
