"""The epochs of a training so far, as its checkpoints hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

from elche.checkpoint.keeper import CheckpointConfig
from elche.runtime.process.launchers import launch_facts
from elche.session.process import process
from elche.trainer.early_stopping import BestEpoch
from elche.trainer.trainer_config import TrainerConfig
from elche.trainer.trainer_result import EpochRecord

BY_LAUNCHER: Final = ("ELCHE_CHECKPOINT_DIR", "ELCHE_RESUME")


@final
class TrainedEpochs:
    """Records of epochs, and the best of them.

    Attributes:
        records: of all epochs, those before a resume included.
        resumed: how many of them were there before it.
        best: the best epoch.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.records: list[EpochRecord] = []
        self.resumed = 0
        self.best = BestEpoch(config.early_stopping)
        self._config = config

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

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        records = [asdict(record) for record in self.records]
        return {"records": records, "best": self.best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self.records = [EpochRecord(**record) for record in state["records"]]
        self.resumed = len(self.records)
        self.best.load_state_dict(state["best"])
