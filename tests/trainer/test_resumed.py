"""A Trainer that was ended goes on from its checkpoint, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import ConfigError

SAMPLES, EPOCHS = 96, 4
GENERATOR = torch.Generator().manual_seed(3)
INPUT = torch.randn(SAMPLES, 3, generator=GENERATOR)
DATA = TensorDataset(INPUT, INPUT.sum(1, keepdim=True))


class _EndedError(Exception):
    """What ends the first run."""


def fit(folder: Path | None, ends_after: int = EPOCHS, **options: Any) -> Any:
    """Trains, with a checkpoint at every end of an epoch and as often in between."""

    def told(record: elche.trainer.EpochRecord) -> None:
        if record.epoch == ends_after:
            raise _EndedError

    torch.manual_seed(4)
    return elche.Trainer(
        lambda: nn.Linear(3, 1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        nn.MSELoss(),
        dataset=DATA,
        batch_size=8,
        epochs=EPOCHS,
        on_epoch_end=told,
        lr_schedule=lambda progress: 1.0 - progress,
        early_stopping=elche.trainer.EarlyStopping(
            metric="train_loss", patience=EPOCHS
        ),
        checkpoint_dir=folder,
        checkpoint_every_s=1e-3,
        **options,
    ).fit()


def test_what_was_ended_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    with pytest.raises(_EndedError):
        fit(tmp_path / "ended", ends_after=2)
    rest = fit(tmp_path / "ended", resume=True)
    assert [each.epoch for each in rest.history] == list(range(EPOCHS))
    for mine, one in zip(rest.history, whole.history, strict=True):
        # of the epoch that the checkpoint lies in, only what was left is in the record
        assert mine.samples < SAMPLES or mine.train_loss == one.train_loss
    assert rest.best_metric == whole.best_metric
    for name, value in whole.model_state.items():
        assert torch.equal(rest.model_state[name], value)
    assert rest.report.samples < SAMPLES * EPOCHS <= whole.report.samples


def test_a_resume_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="resume=True needs checkpoint_dir"):
        fit(None, resume=True)
