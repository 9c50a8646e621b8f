"""One training of a `Trainer`: its loop and its epochs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from elche.checkpoint.keeper import CheckpointConfig
from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.errors import ConfigError, ElcheError
from elche.runtime.process.launchers import launch_facts
from elche.runtime.process.stop_signals import REASONS, StopRequest
from elche.runtime.rank_settings import min_share_samples
from elche.runtime.training import SetupConfig
from elche.session import ranks
from elche.session.metrics import current_metrics
from elche.session.process import current_run, process
from elche.session.progress import ProgressLR
from elche.session.ranks import gather_rows
from elche.session.setup import set_up
from elche.trainer.evaluation import evaluate_by
from elche.trainer.micro_batches import MicroBatches
from elche.trainer.recipe import Recipe
from elche.trainer.trainer_config import EarlyStopping, TrainerConfig
from elche.trainer.trainer_result import EpochRecord, RunReport, TrainResult

BY_LAUNCHER: Final = ("ELCHE_CHECKPOINT_DIR", "ELCHE_RESUME")


class Fitting:
    """One training, with its own run.

    Args:
        recipe: functions and settings of the training.
        stops: stop request, polled between batches.

    Attributes:
        metrics: metrics of the run.
    """

    def __init__(self, recipe: Recipe, stops: StopRequest) -> None:
        self._recipe = recipe
        self._stops = stops
        self._epochs = TrainedEpochs(recipe.config)
        self._config = recipe.config
        model, optimizers, loader = recipe.build()
        run = self._config.run
        asked = SetupConfig(
            config=run,
            epochs=self._config.epochs,
            samples_per_epoch=self._config.samples_per_epoch,
            weight_of=self._config.weight_of,
            micro_batches=not sync_batchnorm_layers(model),
            is_default=recipe.names_no_policy,
            stops=stops,
        )
        self._model, self._optimizers, self._loader = set_up(
            model, optimizers, loader, asked
        )
        self._weights = recipe.weights()
        metrics = current_metrics()
        assert metrics is not None
        metrics.reserved = frozenset({"loss"})
        self.metrics = metrics
        length = self._config.num_samples
        if self._config.drop_last:
            length -= length % self._config.batch_size
        current = current_run()
        run_clips = run.sums_gradients and current is not None
        self._clip_norm = None if run_clips else self._config.max_grad_norm
        total = length * self._config.epochs
        self._schedules = [s for o in optimizers if (s := self._rates(o, total))]
        self._parts = MicroBatches(
            self._model,
            ranks.device(),
            max_samples=run.cap_of(ranks.rank()),
            least_samples=min_share_samples(model),
            is_sum=run.loss_reduction == "sum",
            weights=self._weights,
            host=current,
            on_part=metrics.run_part,
        )

    def run(self, *, heeds_signals: bool) -> TrainResult:
        """Trains, evaluates, and collects the result.

        Args:
            heeds_signals: whether SIGINT and SIGTERM are turned into the stop request;
                the launcher is notified, and does not interfere.
        """
        run = current_run()
        worker = run.worker if run is not None and heeds_signals else None
        if worker is not None:
            worker.heeds_signals(True)
        try:
            return self._run_epochs()
        finally:
            if worker is not None:
                with contextlib.suppress(ElcheError):
                    worker.heeds_signals(False)

    def _run_epochs(self) -> TrainResult:
        stopped_by, config, epochs = "", self._config, self._epochs
        for epoch in epochs.numbers():
            is_whole = self._train_epoch()
            record = self._record(epoch, is_whole)
            stopped_by = self._agreed(is_whole)
            is_judged = is_whole
            if stopped_by and math.isnan(record.eval_loss or 0.0):  # interrupted
                record, is_judged = replace(record, eval_loss=None), False
            if is_whole or record.samples:
                epochs.records.append(record)
            is_enough = is_judged and epochs.judge(record, self._state)
            if is_whole and ranks.is_main_process():
                if config.on_epoch_end is not None:
                    config.on_epoch_end(record)
                self._checkpoint(epoch)
            if stopped_by:
                process.checkpoints.end()
                break
            if is_enough and epoch + 1 < config.epochs:
                stopped_by = "early stopping"
                break
        return TrainResult(
            self._state(),
            epochs.records,
            self._report(epochs.records[epochs.resumed :]),
            stopped_by or None,
            epochs.best_metric,
            epochs.best_state,
        )

    def _train_epoch(self) -> bool:
        """Trains this rank's part of an epoch; False if a rank has ended it early."""
        self._model.train()
        epoch: Any = iter(self._loader)
        with contextlib.closing(epoch) as batches:
            for batch in batches:
                for schedule in self._schedules:
                    schedule.step()
                self._step(batch)
                if self._is_to_stop():
                    break
        run = current_run()
        if run is None:
            return not self._stops.reason
        run.epochs.execution.check()
        return not run.was_left_early

    def _is_to_stop(self) -> bool:
        """True if this rank leaves the loop here; all do if forward synchronises."""
        self._stops.check()
        if process.checkpoints.ends_by_cut:
            return False  # the loop ends at the cut, on all ranks, without loss
        is_asked, run = bool(self._stops.reason), current_run()
        if run is None or not run.meets_in_forward:
            return is_asked
        mine = torch.tensor([is_asked], device="cpu")
        return bool(gather_rows(mine, "Trainer.fit", is_of_batch=False).any())

    def _agreed(self, is_whole: bool) -> str:
        """Reason why all ranks stop here; "" if they continue."""
        reason = self._stops.reason
        code = 1 + REASONS.index(reason) if reason else 0
        mine = torch.tensor([code], device="cpu")
        highest = int(gather_rows(mine, "Trainer.fit", is_of_batch=False).max())
        if not highest:
            return "" if is_whole else "stop"
        return REASONS[highest - 1]

    def _record(self, epoch: int, is_whole: bool) -> EpochRecord:
        fields = {**self.metrics.epoch(None, None).as_fields(), "epoch": epoch}
        return EpochRecord(**fields, eval_loss=self._evaluate() if is_whole else None)

    def _step(self, batch: Any) -> None:
        loss = self._parts.backward(
            batch,
            self.metrics.current_samples,
            lambda part: self._recipe.loss(self._model, part),
        )
        self._update()
        if self._config.run.loss_reduction == "sum":
            loss = loss.detach() / (self.metrics.current_weight or 1.0)
        self.metrics.log("loss", loss)

    def _update(self) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _rates(
        self, optimizer: torch.optim.Optimizer, total_samples: int
    ) -> ProgressLR | None:
        """Scheduler of every step's learning rate; None if it is scaled only once."""
        schedule = self._config.lr_schedule
        factor = self._config.lr_scale
        if schedule is not None:
            return ProgressLR(optimizer, schedule, total_samples, factor)
        if factor != 1.0:
            ProgressLR(optimizer, lambda _: 1.0, total_samples, factor).step()
        return None

    def _checkpoint(self, epoch: int) -> None:
        if (save := self._config.on_checkpoint) is None:
            return
        try:
            save(epoch, self._state())
        except Exception:
            logger.exception(
                "on_checkpoint failed after epoch %d; training continues", epoch
            )

    def _state(self) -> dict[str, Any]:
        """State dict of the consensus, copied to the CPU."""
        return {
            name: value.detach().to("cpu", copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in self._model.state_dict().items()
        }

    def _evaluate(self) -> float | None:
        """Mean loss of the consensus; ranks divide the evaluation set by speed."""
        dataset = self._config.eval_dataset
        if dataset is None:
            return None
        self._model.eval()
        loader = self._recipe.loader_over(dataset)
        step = self._recipe.mean_loss_of(self._model)
        loss: float = evaluate_by(
            step, loader, self._weights, lambda: bool(self._stops.reason)
        )
        self._model.train()
        return loss

    def _report(self, history: list[EpochRecord]) -> RunReport:
        run = current_run()
        ends = run.epochs.reports if run is not None else []
        duration_s = sum(record.duration_s for record in history)
        samples = sum(record.samples for record in history)
        world_size = ranks.world_size()

        def per_rank(name: str) -> tuple[float, ...]:
            # the last ranks may have died, or joined, after some epochs
            per_epoch = (getattr(record, name) for record in history)
            return tuple(map(sum, zip_longest(*per_epoch, fillvalue=0.0)))

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


logger = logging.getLogger(__name__)


@final
class TrainedEpochs:
    """Records of epochs, and the best epoch; the same on every rank.

    Attributes:
        records: records of all epochs, including those before a resume.
        resumed: number of records from before a resume.
        best_metric: metric of the best epoch; None before there is one.
        best_state: state of the model after the best epoch.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._worse_epochs = 0
        self.records: list[EpochRecord] = []
        self.resumed = 0
        self.best_metric: float | None = None
        self.best_state: dict[str, Any] | None = None

    def numbers(self) -> Iterator[int]:
        """Numbers of the epochs to train; after a resume those that remain."""
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
        """Judges an epoch; True if training should end. NaN is no improvement."""
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
        """Restores from :meth:`state_dict`."""
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
