"""The epochs of a training so far, as its checkpoints hold them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

from elche.checkpoint.keeper import CheckpointConfig
from elche.errors import ConfigError
from elche.runtime.process.launchers import launch_facts
from elche.session.process import process
from elche.trainer.trainer_config import EarlyStopping, TrainerConfig
from elche.trainer.trainer_result import EpochRecord

BY_LAUNCHER: Final = ("ELCHE_CHECKPOINT_DIR", "ELCHE_RESUME")


@final
class TrainedEpochs:
    """Records of epochs and the best of them; the same on every rank.

    Attributes:
        records: of all epochs, those before a resume included.
        resumed: how many of them were there before it.
        best_metric: of the best epoch, None before there is one.
        best_state: the model's, after it.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._worse_epochs = 0
        self.records: list[EpochRecord] = []
        self.resumed = 0
        self.best_metric: float | None = None
        self.best_state: dict[str, Any] | None = None

    def numbers(self) -> Iterator[int]:
        """Numbers of the epochs to train, those left where the run is resumed."""
        config, by_launcher = self._config, any(map(os.environ.get, BY_LAUNCHER))
        by_number = config.checkpoint_dir is None and not launch_facts().may_grow
        if by_number and not by_launcher:
            return iter(range(config.epochs))
        keeper = process.checkpoints
        keeper.register({"trainer": self})
        if config.checkpoint_dir is not None and not by_launcher:
            folder = Path(config.checkpoint_dir)
            keeper.configure(
                CheckpointConfig(folder=folder, every_s=config.checkpoint_every_s)
            )
            if config.resume:
                keeper.resume(folder)
        return keeper.epochs(config.epochs)

    def judge(self, record: EpochRecord, state: Callable[[], dict[str, Any]]) -> bool:
        """Looks at an epoch; returns whether training is to end. NaN is no better."""
        config = self._config.early_stopping
        if config is None:
            return False
        value, gain = _metric(config, record), math.inf
        if self.best_metric is not None:
            gain = self.best_metric - value
            gain *= 1.0 if config.mode == "min" else -1.0
        if not math.isnan(value) and gain > config.min_delta:
            self.best_metric, self.best_state = value, state()
            self._worse_epochs = 0
            return False
        self._worse_epochs += 1
        return self._worse_epochs >= config.patience

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        best = {
            "metric": self.best_metric,
            "state": self.best_state,
            "worse_epochs": self._worse_epochs,
        }
        return {"records": [asdict(each) for each in self.records], "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""
        self.records = [EpochRecord(**record) for record in state["records"]]
        self.resumed = len(self.records)
        best = state["best"]
        self.best_metric, self.best_state = best["metric"], best["state"]
        self._worse_epochs = best["worse_epochs"]


def _metric(config: EarlyStopping, record: EpochRecord) -> float:
    if config.metric == "train_loss":
        return record.train_loss
    if config.metric == "eval_loss" and record.eval_loss is not None:
        return record.eval_loss
    if config.metric not in record.scalars:
        raise ConfigError(
            f"early stopping watches {config.metric!r}, and the epoch has only "
            f"{sorted(['train_loss', *record.scalars])}; log it in every epoch, or "
            "give another metric"
        )
    return record.scalars[config.metric]
