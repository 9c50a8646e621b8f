"""`elche.Trainer`: the library owns the loop."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from elche import session, session_metrics
from elche.coordination.accounts.metrics import EpochMetrics
from elche.errors import ConfigError
from elche.learning_rate import ProgressLR
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.data.transfer import to_device
from elche.runtime.rank_settings import min_share_samples
from elche.runtime.training import SetupConfig
from elche.runtime.windows.micro_batches import (
    MicroBatches,
    PartsConfig,
    meets_in_batches,
)
from elche.trainer.trainer_config import (
    EpochRecord,
    RunReport,
    TrainResult,
    trainer_config,
)

logger = logging.getLogger(__name__)

LossFn = Callable[[Any, Any], torch.Tensor]


class Trainer:
    """Trains a model on all ranks of this run.

    Args:
        model_fn: makes the model; called once on every rank, which then gets rank 0's
            parameters.
        optimizer_fn: makes the optimizer from the model's parameters.
        loss_fn: ``loss_fn(output, target)`` of a batch ``(input, target)``, such as
            ``nn.CrossEntropyLoss()``; or ``loss_fn(model, batch)`` if its first
            parameter is called ``model``. Returns a scalar: the mean over the batch
            (with ``loss_reduction="sum"``, the sum).
        **options: fields of `TrainerConfig`, and of `elche.RunConfig` such as
            ``policy="cadence"``.

    Raises:
        ConfigError: an option is unknown or wrong.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: LossFn,
        **options: Any,
    ) -> None:
        for name, function in (
            ("model_fn", model_fn),
            ("optimizer_fn", optimizer_fn),
            ("loss_fn", loss_fn),
        ):
            if not callable(function):
                raise ConfigError(f"expected {name} to be callable, got {function!r}")
        self._model_fn = model_fn
        self._optimizer_fn = optimizer_fn
        self._loss_fn = loss_fn
        self._takes_model = _first_parameter(loss_fn) == "model"
        self.config = trainer_config(options)
        config = options.get("config")
        self.names_no_policy = session.names_no_policy(config, options)

    def fit(self) -> TrainResult:
        """Trains for all epochs; every rank must call it.

        Returns:
            The consensus and what happened, the same on every rank.

        Raises:
            ConfigError: the loss is not a scalar, or an argument is wrong.
            MismatchError: ranks disagree about model, data or settings.
            NonFiniteError: a rank's update was not finite twice in a row (see
                `elche.RunConfig.non_finite`), or under ``sync`` the parameters are NaN.
            RemoteRankError: another rank failed.
            CommunicationError: the ranks did not come together, or lost each other;
                `DeadlineError` where a wait took longer than ``timeout_s``.
        """
        with session.failing_together():
            fitting = _Fitting(self)
            result = fitting.run()
        session.shutdown()
        return result

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch.

        Raises:
            ConfigError: it is not a scalar tensor, or the batch is no pair.
        """
        if self._takes_model:
            loss = self._loss_fn(model, batch)
        else:
            if not isinstance(batch, (list, tuple)) or len(batch) != 2:
                raise ConfigError(
                    "expected the dataset to yield (input, target) pairs, got "
                    f"{type(batch).__name__}; or give loss_fn(model, batch)"
                )
            loss = self._loss_fn(model(batch[0]), batch[1])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = (
                f"a tensor of shape {list(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise ConfigError(
                f"expected loss_fn to return a scalar tensor, got {shape}; take the "
                "mean over the batch"
            )
        return loss.reshape(())

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Makes model, optimizer and loader of this rank."""
        config = self.config
        if config.run.seed is not None:
            torch.manual_seed(config.run.seed)
        model = self._model_fn()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"expected model_fn to return a Module, got {model!r}")
        model.to(session.device())
        optimizer = self._optimizer_fn(model.parameters())
        loader: DataLoader[Any] = DataLoader(
            config.dataset,
            batch_size=config.batch_size,
            shuffle=None if config.is_stream else config.shuffle,
            drop_last=config.drop_last,
            collate_fn=config.collate_fn,
            num_workers=config.num_workers,
        )
        return model, optimizer, loader


class _Fitting:
    """One call of `Trainer.fit`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._config = trainer.config
        model, optimizer, loader = trainer.build()
        run = self._config.run
        asked = SetupConfig(
            config=run,
            epochs=self._config.epochs,
            samples_per_epoch=self._config.samples_per_epoch,
            weight_of=self._config.weight_of,
            micro_batches=not meets_in_batches(model),
            is_default=trainer.names_no_policy,
        )
        self._model, self._optimizer, self._loader = session.set_up(
            model, optimizer, loader, asked
        )
        weight_of = self._config.weight_of
        self._weights = (
            None if weight_of is None else BatchWeights(weight_of, session.rank())
        )
        metrics = session_metrics.current_metrics()
        assert metrics is not None
        metrics.reserved = frozenset({"loss"})
        metrics.on_window = self._config.on_window_end
        self._metrics = metrics
        length = self._config.num_samples
        if self._config.drop_last:
            length -= length % self._config.batch_size
        run_clips = (
            self._config.run.sums_gradients and session.current_run() is not None
        )
        self._clip_norm = None if run_clips else self._config.max_grad_norm
        self._schedule = self._rates(optimizer, length * self._config.epochs)
        current = session.current_run()
        self._parts = MicroBatches(
            self._model,
            session.device(),
            PartsConfig(
                max_samples=run.cap_of(session.rank()),
                least_samples=min_share_samples(model),
                is_sum=run.loss_reduction == "sum",
                weights=self._weights,
            ),
            None if current is None else current.host,
            metrics.run_part,
        )

    def run(self) -> TrainResult:
        """Trains, evaluates, and collects."""
        history: list[EpochRecord] = []
        for epoch in range(self._config.epochs):
            record = self._epoch(epoch)
            history.append(record)
            if session.is_main_process():
                if self._config.on_epoch_end is not None:
                    self._config.on_epoch_end(record)
                self._checkpoint(epoch, sum(each.samples for each in history))
        return TrainResult(self._state(), history, self._report(history))

    def _epoch(self, epoch: int) -> EpochRecord:
        self._model.train()
        started_s = time.monotonic()
        for batch in self._loader:
            self._metrics.take_windows()
            if self._schedule is not None:
                self._schedule.step()
            self._step(batch)
        duration_s = time.monotonic() - started_s
        self._metrics.take_windows()
        metrics = self._metrics.last_epoch()
        return EpochRecord(
            epoch=epoch,
            train_loss=_train_loss(metrics),
            eval_loss=self._evaluate(metrics),
            samples=metrics.samples,
            discarded_samples=metrics.discarded_samples,
            duration_s=duration_s,
            samples_per_s=metrics.samples / duration_s,
            shares=metrics.shares,
            scalars=metrics.scalars,
            busy_s=metrics.busy_s,
            data_wait_s=metrics.data_wait_s,
            transfer_s=metrics.transfer_s,
            sync_wait_s=metrics.sync_wait_s,
        )

    def _step(self, batch: Any) -> None:
        loss = self._parts.backward(
            batch,
            self._metrics.samples_in_hand,
            lambda part: self._trainer.loss(self._model, part),
        )
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._config.run.loss_reduction == "sum":
            loss = loss.detach() / (self._metrics.weight_in_hand or 1.0)
        self._metrics.log("loss", loss)

    def _rates(
        self, optimizer: torch.optim.Optimizer, total_samples: int
    ) -> ProgressLR | None:
        """What sets the rate of every step; without a schedule it is scaled once."""
        schedule = self._config.lr_schedule
        factor = self._config.lr_factor(session.world_size())
        if schedule is not None:
            return ProgressLR(optimizer, schedule, total_samples, factor)
        if factor != 1.0:
            ProgressLR(optimizer, _constant, total_samples, factor).step()
        return None

    def _checkpoint(self, epoch: int, samples: int) -> None:
        """Hands a checkpoint out if one is due; what the callback raises is logged."""
        save = self._config.on_checkpoint
        every = self._config.checkpoint_every_epochs or 1
        if save is None or (epoch + 1) % every:
            return
        checkpoint = {"model": self._state(), "epoch": epoch, "samples": samples}
        try:
            save(epoch, checkpoint)
        except Exception:
            logger.exception(
                "on_checkpoint failed after epoch %d; training goes on", epoch
            )

    def _state(self) -> dict[str, Any]:
        """The consensus, copied to the CPU."""
        return {
            name: value.detach().to("cpu", copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in self._model.state_dict().items()
        }

    def _evaluate(self, metrics: EpochMetrics) -> float | None:
        """Mean loss of the consensus; ranks divide the evaluation set by speed."""
        dataset = self._config.eval_dataset
        if dataset is None:
            return None
        start, stop = _my_part(metrics.shares, len(dataset))  # type: ignore[arg-type]
        size = self._config.eval_batch_size or self._config.batch_size
        collate = self._config.collate_fn or default_collate
        self._model.eval()
        loss_sum = weight_sum = 0.0
        with torch.no_grad():
            for at in range(start, stop, size):
                items = [dataset[index] for index in range(at, min(stop, at + size))]
                batch, weight = collate(items), float(len(items))
                if self._weights is not None:
                    weight = self._weights.of(batch, f"evaluation samples from {at} on")
                if not weight:
                    continue
                batch = to_device(batch, session.device())
                loss = self._trainer.loss(self._model, batch)
                is_sum = self._config.run.loss_reduction == "sum"
                loss_sum += float(loss) * (1.0 if is_sum else weight)
                weight_sum += weight
        self._model.train()
        total_loss, total = _summed([loss_sum, weight_sum])
        return total_loss / (total or 1.0)

    def _report(self, history: list[EpochRecord]) -> RunReport:
        run = session.current_run()
        ends = run.reports if run is not None else []
        duration_s = sum(record.duration_s for record in history)
        samples = sum(record.samples for record in history)
        world_size = session.world_size()

        def per_rank(name: str) -> tuple[float, ...]:
            per_epoch = (getattr(record, name) for record in history)
            return tuple(map(sum, zip(*per_epoch, strict=True)))

        return RunReport(
            policy=self._config.run.policy,
            world_size=world_size,
            samples=samples,
            discarded_samples=sum(sum(each.discarded_samples) for each in history),
            duration_s=duration_s,
            samples_per_s=samples / duration_s if duration_s else 0.0,
            busy_s=per_rank("busy_s"),
            data_wait_s=per_rank("data_wait_s"),
            sync_s=sum(end.sync_s for end in ends),
            synchronisations=sum(end.windows for end in ends),
            anchor=ends[-1].anchor if ends else 1,
        )


def _my_part(shares: tuple[float, ...], length: int) -> tuple[int, int]:
    """This rank's part of a set that the ranks divide as rank 0 says."""
    run, rank = session.current_run(), session.rank()
    parts = torch.zeros(session.world_size(), dtype=torch.float64, device="cpu")
    if rank == 0:
        parts.copy_(torch.tensor(shares, device="cpu"))
    if run is not None:
        run.worker.group.broadcast(parts, "dividing the evaluation set")
    ends = [round(length * end) for end in parts.cumsum(0).tolist()]
    ends[-1] = length
    return (ends[rank - 1] if rank else 0), ends[rank]


def _constant(progress: float) -> float:
    return 1.0


def _train_loss(metrics: EpochMetrics) -> float:
    """The mean loss; a mean of the finite ones alone would hide that it diverged."""
    if "loss" in metrics.non_finite:
        return math.nan
    return metrics.scalars.get("loss", 0.0)


def _summed(values: list[float]) -> list[float]:
    """Sums over all ranks."""
    run = session.current_run()
    if run is None:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    run.worker.group.all_reduce(tensor, "summing losses")
    summed: list[float] = tensor.tolist()
    return summed


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""
