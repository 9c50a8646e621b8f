"""Result of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from elche.coordination.accounts.metrics import EpochMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord(EpochMetrics):
    """Results of an epoch: its metrics, and the losses.

    Times are of training, without evaluation. ``scalars`` has the mean over samples (or
    by ``weight_of``) of each scalar that was logged, and of ``"loss"``. In a run of
    more than 64 ranks only rank 0 holds numbers per rank; the others hold one for all
    together.

    Attributes:
        eval_loss: of the consensus, None without an evaluation set.
    """

    eval_loss: float | None

    @property
    def train_loss(self) -> float:
        """Mean over all samples of all ranks (or by ``weight_of``).

        Not a number if the loss of a batch was not finite: a mean of the finite ones
        alone would hide that training diverged.
        """
        return math.nan if "loss" in self.non_finite else self.scalars.get("loss", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Results of the whole run.

    Attributes:
        policy: the policy.
        world_size: ranks.
        samples: of all ranks in all epochs, those whose contribution is in the model.
        discarded_samples: that all ranks trained on beside them; see
            `elche.monitor.EpochMetrics`.
        duration_s: of training, without evaluation.
        samples_per_s: of the whole run.
        busy_s: delivered time per rank (data wait, transfer and compute); in a run of
            more than 64 ranks, on ranks other than 0, of all together.
        data_wait_s: of it, waiting for data.
        sync_s: in reductions.
        synchronisations: how many.
        anchor: of El Che at the end (1 under ``sync``).
    """

    policy: str
    world_size: int
    samples: int
    discarded_samples: int
    duration_s: float
    samples_per_s: float
    busy_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    sync_s: float
    synchronisations: int
    anchor: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Return value of `Trainer.fit`, the same on every rank (but see `EpochRecord`).

    Attributes:
        model_state: state dict of the consensus, on the CPU.
        history: a record per epoch. Of an epoch that was stopped, of the part that was
            run, and without evaluation.
        report: how the run went.
        stopped_by: what ended it before its last epoch: ``"early stopping"``,
            ``"stop"`` (the handle's), ``"SIGINT"``
            or ``"SIGTERM"``; None: nothing.
        best_metric: that ``early_stopping`` watches, of the best epoch.
        best_state: state dict after that epoch, on the CPU.
    """

    model_state: dict[str, Any]
    history: list[EpochRecord]
    report: RunReport
    stopped_by: str | None = None
    best_metric: float | None = None
    best_state: dict[str, Any] | None = None
