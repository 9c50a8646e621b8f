"""A Trainer's early end, and the model that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from elche.errors import ConfigError
from elche.trainer.trainer_result import EpochRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Ends training when a metric has not improved for some epochs.

    The model of the best epoch is kept: ``result.best_state``.

    Attributes:
        metric: ``"eval_loss"``, ``"train_loss"`` or the name of a logged scalar.
        patience: epochs without improvement after which training ends.
        min_delta: least change that counts as an improvement.
        mode: ``"min"`` where less is better, or ``"max"``.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"expected mode to be 'min' or 'max', got {self.mode!r}")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ConfigError(
                f"expected patience to be an int >= 1, got {self.patience!r}"
            )
        if not 0.0 <= self.min_delta < math.inf:
            raise ConfigError(f"expected a min_delta from 0 on, got {self.min_delta!r}")

    def value_of(self, record: EpochRecord) -> float:
        """The metric of an epoch.

        Raises:
            ConfigError: there is none of that name.
        """
        if self.metric == "train_loss":
            return record.train_loss
        if self.metric == "eval_loss" and record.eval_loss is not None:
            return record.eval_loss
        if self.metric not in record.scalars:
            raise ConfigError(
                f"early stopping watches {self.metric!r}, and the epoch has only "
                f"{sorted(['train_loss', *record.scalars])}; log it in every epoch, or "
                "give another metric"
            )
        return record.scalars[self.metric]


class BestEpoch:
    """The best epoch so far; the same on every rank, as its records are.

    Args:
        config: what is watched; None for nothing.

    Attributes:
        metric: of the best epoch, None before there is one.
        state: the model's, after it.
    """

    def __init__(self, config: EarlyStopping | None) -> None:
        self._config = config
        self._worse_epochs = 0
        self.metric: float | None = None
        self.state: dict[str, Any] | None = None

    def take(self, record: EpochRecord, state: Callable[[], dict[str, Any]]) -> bool:
        """Looks at an epoch; returns whether training is to end. NaN is no better."""
        config = self._config
        if config is None:
            return False
        value = config.value_of(record)
        gain = math.inf
        if self.metric is not None:
            gain = self.metric - value if config.mode == "min" else value - self.metric
        if not math.isnan(value) and gain > config.min_delta:
            self.metric, self.state, self._worse_epochs = value, state(), 0
            return False
        self._worse_epochs += 1
        return self._worse_epochs >= config.patience

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "metric": self.metric,
            "state": self.state,
            "worse_epochs": self._worse_epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self.metric, self.state = state["metric"], state["state"]
        self._worse_epochs = state["worse_epochs"]
