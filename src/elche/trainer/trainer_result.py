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
    by ``weight_of``) of each logged scalar, and of ``"loss"``. In a run of more than 64
    ranks only rank 0 holds numbers per rank; the others hold one total.

    Attributes:
        eval_loss: mean loss of the consensus; None without an evaluation set.
    """

    eval_loss: float | None

    @property
    def train_loss(self) -> float:
        """Mean loss over all samples of all ranks (or by ``weight_of``).

        NaN if the loss of a batch was not finite: a mean of the finite ones would hide
        that training diverged.
        """
        return math.nan if "loss" in self.non_finite else self.scalars.get("loss", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Results of the whole run.

    Attributes:
        policy: the policy.
        world_size: number of ranks.
        samples: samples in the model, of all ranks and epochs.
        discarded_samples: trained samples that are not in the model; see
            `elche.monitor.EpochMetrics`.
        duration_s: training time, without evaluation.
        samples_per_s: throughput of the whole run.
        busy_s: delivered time per rank (data wait, transfer and compute); in a run of
            more than 64 ranks, on ranks other than 0, their total.
        data_wait_s: part of `busy_s` spent waiting for data.
        sync_s: time spent in reductions.
        synchronisations: number of reductions.
        anchor: El Che's anchor at the end (1 under ``sync``).
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
        history: one record per epoch. A stopped epoch's record covers the part that was
            run, without evaluation.
        report: summary of the run.
        stopped_by: reason for an early end: ``"early stopping"``, ``"stop"`` (the
            handle's), ``"SIGINT"`` or ``"SIGTERM"``; None if all epochs were run.
        best_metric: metric of ``early_stopping`` in the best epoch.
        best_state: state dict after the best epoch, on the CPU.
    """

    model_state: dict[str, Any]
    history: list[EpochRecord]
    report: RunReport
    stopped_by: str | None = None
    best_metric: float | None = None
    best_state: dict[str, Any] | None = None
