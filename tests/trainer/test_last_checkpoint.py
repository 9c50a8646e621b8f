"""A Trainer that makes checkpoints and is stopped: a result, and a last checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import DeadlineError
from tests.distributed.cases.tasks import identical
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("plain_environment")

SAMPLES, EPOCHS, BATCH = 600, 3, 4
STEPS = SAMPLES // BATCH
WAIT_S = 200.0
DATA = TensorDataset(torch.arange(float(SAMPLES))[:, None] / SAMPLES)
Act = Callable[[], None]


class Loss:
    """Does something in a batch of training or of evaluation, counted on this rank."""

    def __init__(
        self, act: Act | None = None, at: int = 0, *, in_evaluation: bool = False
    ) -> None:
        self._act, self._at, self._in_evaluation = act, at, in_evaluation
        self.batches = [0, 0]

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        kind = not model.training
        self.batches[kind] += 1
        is_here = kind == self._in_evaluation and self.batches[kind] == self._at
        if is_here and self._act is not None:
            self._act()
        loss: torch.Tensor = (model(batch[0]) - batch[0]).square().mean()
        return loss


def normed() -> nn.Module:
    layers = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    return elche.convert_sync_batchnorm(nn.Sequential(*layers))


def trainer(
    folder: Path | None, loss: Loss, *, has_norm: bool = False, **options: Any
) -> elche.Trainer:
    return elche.Trainer(
        normed if has_norm else lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        loss,
        **{"dataset": DATA, **options},
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=5,
        lr_schedule=lambda progress: 1.0 - progress / 2,
        checkpoint_dir=folder,
    )


def num_checkpoints(folder: Path) -> int:
    return len(list(folder.glob("checkpoint-*/manifest.json")))


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("way", ["fit", "start", "stop"])
def test_inside_an_epoch_it_goes_on_from_there(tmp_path: Path, way: str) -> None:
    whole = trainer(None, Loss()).fit()
    reached, may_go = threading.Event(), threading.Event()

    def waits() -> None:
        reached.set()
        assert may_go.wait(WAIT_S)

    asked = trainer(tmp_path, Loss(waits if way == "stop" else terminated, STEPS + 7))
    if way == "fit":
        first = asked.fit()
    else:
        handle = asked.start()
        if way == "stop":
            assert reached.wait(WAIT_S)
            with pytest.raises(DeadlineError):
                handle.stop(0.0)
            may_go.set()
        first = handle.join(WAIT_S)
    assert first.stopped_by == ("stop" if way == "stop" else "SIGTERM")
    assert num_checkpoints(tmp_path) == 1
    done = [record.samples for record in first.history]
    assert done[0] == SAMPLES
    assert 0 < done[1] < SAMPLES
    rest = trainer(tmp_path, Loss(), resume=True).fit()
    assert [record.epoch for record in rest.history] == [0, 1, 2]
    assert rest.history[1].samples == SAMPLES - done[1]
    assert identical([rest.model_state, whole.model_state])


def test_in_an_evaluation_it_breaks_that_off(tmp_path: Path) -> None:
    loss = Loss(terminated, STEPS + 1, in_evaluation=True)
    early = elche.trainer.EarlyStopping(patience=EPOCHS)
    options = {"eval_dataset": DATA, "early_stopping": early}
    first = trainer(tmp_path, loss, **options).fit()
    assert first.stopped_by == "SIGTERM"
    assert loss.batches[1] == STEPS + 1
    assert [record.eval_loss is None for record in first.history] == [False, True]
    assert first.best_metric == first.history[0].eval_loss
    again = Loss()
    rest = trainer(tmp_path, again, resume=True, **options).fit()
    assert again.batches[0] == STEPS
    assert [record.eval_loss is None for record in rest.history] == [False, True, False]


def test_what_an_error_has_ended_goes_on_to_the_same_end(tmp_path: Path) -> None:
    early = elche.trainer.EarlyStopping(patience=EPOCHS)
    options: dict[str, Any] = {"early_stopping": early, "eval_dataset": DATA}
    whole = trainer(None, Loss(), **options).fit()

    def fail() -> None:
        raise ZeroDivisionError

    options["checkpoint_every_s"] = 1e-3
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, Loss(fail, 2 * STEPS + 7), **options).fit()
    rest = trainer(tmp_path, Loss(), **options, resume=True).fit()
    losses = [[each.eval_loss for each in run.history] for run in (rest, whole)]
    assert losses[0] == losses[1]
    assert rest.best_metric == whole.best_metric
    assert identical([rest.model_state, whole.model_state])
    assert rest.report.samples < SAMPLES * EPOCHS == whole.report.samples


def test_in_the_last_evaluation_too() -> None:
    loss = Loss(terminated, 2 * STEPS + 1, in_evaluation=True)
    result = trainer(None, loss, eval_dataset=DATA).fit()
    assert result.stopped_by == "SIGTERM"
    assert result.history[-1].eval_loss is None
    assert loss.batches[1] == 2 * STEPS + 1


def test_between_epochs_what_follows_is_not_lost(tmp_path: Path) -> None:
    """The next epoch is one batch, and over before it could be cut."""
    few = {"dataset": TensorDataset(DATA.tensors[0][:BATCH])}
    loss, again = Loss(), Loss()
    ended = {"on_epoch_end": lambda record: terminated()}
    first = trainer(tmp_path, loss, **few, **ended).fit()
    assert first.stopped_by == "SIGTERM"
    assert len(first.history) == loss.batches[0]
    rest = trainer(tmp_path, again, **few, resume=True).fit()
    assert len(rest.history) == EPOCHS
    assert loss.batches[0] + again.batches[0] == EPOCHS


def stopped_on(folder: Path, policy: str, stopping: set[int], where: str) -> Any:
    act = terminated if elche.rank() in stopping else None
    is_evaluation = where == "evaluation"
    loss = Loss(act, 1 if is_evaluation else 5, in_evaluation=is_evaluation)
    asked = trainer(
        None if "without a folder" in where else folder,
        loss,
        policy=policy,
        eval_dataset=DATA if is_evaluation else None,
        has_norm="norm" in where,
    )
    result = asked.fit() if len(stopping) == 1 else asked.start().join(WAIT_S)
    return [
        result.model_state,
        result.stopped_by,
        [
            (record.epoch, record.samples, record.eval_loss, record.train_loss)
            for record in result.history
        ],
    ]


def resumed(folder: Path, policy: str) -> Any:
    result = trainer(folder, Loss(), policy=policy, resume=True).fit()
    return [result.model_state, [record.samples for record in result.history]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("policy", "stopping", "where"),
    [
        ("sync", {0}, "training"),
        ("sync", {1}, "training"),
        ("cadence", {1}, "training"),
        ("async", {0}, "training"),
        ("sync", {1}, "evaluation"),
        ("sync", {0, 1}, "training without a folder"),
        ("sync", {1}, "training without a folder, norm"),
        ("cadence", {1}, "training without a folder"),
        ("async", {0}, "training without a folder"),
    ],
)
def test_a_signal_on_one_rank_or_all_stops_all(
    ranks2: RankPool, tmp_path: Path, policy: str, stopping: set[int], where: str
) -> None:
    both = ranks2.serve(stopped_on, tmp_path, policy, stopping, where, env=FOUR_TO_ONE)
    assert identical([each[0] for each in both])
    assert both[0][1:] == both[1][1:]
    _, stopped_by, records = both[0]
    assert stopped_by == "SIGTERM"
    epoch, samples, loss, _ = records[-1]
    assert (samples == SAMPLES) == (where == "evaluation")
    assert loss is None
    if "without a folder" in where:
        return
    assert num_checkpoints(tmp_path) == 1
    again = ranks2.serve(resumed, tmp_path, policy, env=FOUR_TO_ONE)
    assert identical([each[0] for each in again])
    left = [] if where == "evaluation" else [SAMPLES - samples]
    own = again[0][1][epoch + (where == "evaluation") :]
    assert own == [*left, *[SAMPLES] * (EPOCHS - epoch - 1)]
