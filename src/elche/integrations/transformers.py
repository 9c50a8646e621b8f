"""Hugging Face's Trainer on unequal devices, under `sync`.

The Trainer's own loop runs on every rank, in a process that Accelerate treats as the
only one. A batch of the loop is this rank's part of an optimizer step
(`optimizer_steps`). Gradients are reduced once, in the step's last backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils.data import IterableDataset

from elche.config import RunConfig
from elche.devices import choice
from elche.errors import ConfigError
from elche.integrations.optimizer_steps import (
    StepBatch,
    StepEpochs,
    items_of,
    step_loader,
)
from elche.integrations.shared_figures import MainEvaluation, StepLosses
from elche.pipeline.setup.pretrained import log_untried
from elche.runtime.process.environment import read_placement
from elche.runtime.training import SetupConfig
from elche.session import ranks
from elche.session.metrics import batch_weight
from elche.session.options import run_config
from elche.session.process import current_run, failing_together, shutdown
from elche.session.setup import set_up

try:
    import transformers.trainer as hf_trainer
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput
except ImportError as error:
    raise ConfigError(
        "elche.integrations.transformers needs Python 3.11 and transformers; install "
        f"it with pip install 'elche[transformers]' ({error})"
    ) from error
if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
    from transformers import TrainingArguments as _Arguments
else:
    _Trainer = _Arguments = object

if not hasattr(Trainer, "_prepare_for_training"):
    raise ConfigError(
        "expected transformers 5.23 or newer, whose Trainer has _prepare_for_training; "
        "install it with pip install 'elche[transformers]'"
    )
log_untried()

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Environment variables from which Accelerate detects other ranks."""
REFUSED_ARGUMENTS = {
    "deepspeed": "it shards the model itself",
    "fsdp": "it shards the model itself",
    "parallelism_config": "it divides the ranks itself",
    "auto_find_batch_size": "it restarts training on the rank that ran out of memory "
    "alone; lower per_device_train_batch_size",
    "enable_jit_checkpoint": "a signal to one rank would save on that rank only",
    "include_num_input_tokens_seen": "it counts the tokens of one rank",
}
"""Arguments that are unsupported on several ranks, with the reason."""


class ElcheArgumentsMixin(_Arguments):
    """Training arguments of one rank, with a single-process Accelerate state.

    For custom arguments: ``class Args(ElcheArgumentsMixin, SFTConfig)``.

    Raises:
        ConfigError: an argument is unsupported on several ranks.
    """

    def __post_init__(self) -> None:
        for name, why in REFUSED_ARGUMENTS.items():
            if getattr(self, name, None) not in (None, False, "", "no"):
                raise ConfigError(f"elche does not run with {name}=: {why}")
        if getattr(self, "train_sampling_strategy", None) == "batch_rebalance":
            raise ConfigError(
                "elche divides batches by the devices' speed, not by length; leave "
                "train_sampling_strategy='batch_rebalance' out"
            )
        super().__post_init__()
        # Otherwise Accelerate's main process would read streams for other ranks.
        self.accelerator_config.dispatch_batches = False

    @cached_property
    def _setup_devices(self) -> torch.device:
        placement = read_placement()
        device = placement.device
        if self.use_cpu and device.type != "cpu":
            raise ConfigError(
                f"use_cpu=True, but the device of rank {placement.rank} is {device}; "
                "leave it out, and name devices in elche run --devices"
            )
        choice.use(device)
        local_rank = int(os.environ.get("LOCAL_RANK", placement.rank))
        AcceleratorState._reset_state(reset_partial_state=True)
        with patch.dict(os.environ):
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
            state = PartialState(cpu=device.type == "cpu")
        state.device = device
        state.process_index, state.local_process_index = placement.rank, local_rank
        self.distributed_state = state
        self._n_gpu = int(device.type != "cpu")
        return device


class ElcheTrainingArguments(ElcheArgumentsMixin, TrainingArguments):
    """``transformers.TrainingArguments``; see `ElcheArgumentsMixin`."""


class ElcheTrainerMixin(_Trainer):
    """Shares each optimizer step of a Trainer among the ranks of this run.

    For a custom Trainer: ``class Mine(ElcheTrainerMixin, SFTTrainer)``. A step's global
    batch is ``per_device_train_batch_size * gradient_accumulation_steps``, as on one
    device; a rank's share runs in micro-batches of ``per_device_train_batch_size``. The
    loss of a micro-batch must be a mean: ``num_items_in_batch`` is the number of labels
    in that micro-batch, by which elche weights it.

    Args:
        *args: arguments of the Trainer.
        elche_config: the run's settings; policy ``"sync"``.
        **kwargs: arguments of the Trainer.

    Raises:
        ConfigError: a setting is unsupported on several ranks.
    """

    def __init__(
        self, *args: Any, elche_config: RunConfig | None = None, **kwargs: Any
    ) -> None:
        self._run_config = run_config(elche_config, {})
        if self._run_config.policy != "sync":
            raise ConfigError(
                "the Trainer steps, saves and evaluates by its own count of steps, "
                "which windows change; expected policy 'sync', got "
                f"{self._run_config.policy!r} (elche_config, or ELCHE_POLICY)"
            )
        self._epochs: StepEpochs | None = None
        self._step_losses: StepLosses | None = None
        self._main_evaluation: MainEvaluation | None = None
        # Per remaining micro-batch of the step: its share of the loss (0 if empty), and
        # its number of counted labels.
        self._shares: list[tuple[float, float | None]] = []
        super().__init__(*args, **kwargs)
        if read_placement().world_size > 1:
            self._check_ranks()

    def _check_ranks(self) -> None:
        """Rejects settings that are unsupported on several ranks."""
        if not isinstance(self.args, ElcheArgumentsMixin):
            raise ConfigError(
                "expected args to be an elche.integrations.transformers."
                f"ElcheTrainingArguments, got {type(self.args).__name__}, with which "
                "Accelerate would divide the work as well"
            )
        if self.is_model_parallel or self.is_distributed_loading_by_transformers:
            raise ConfigError(
                "the model is divided over devices (device_map, DistributedConfig); "
                "expected one that is whole on the device of each rank"
            )
        data = self.train_dataset
        if isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
            raise ConfigError(
                f"how long is an epoch of the stream {type(data).__name__}? On several "
                "ranks its length must be known: give the dataset __len__"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does, then ends the run on all ranks."""
        with failing_together():
            result = super().train(*args, **kwargs)
        shutdown()
        self._epochs = self._step_losses = self._main_evaluation = None
        return result

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Searches as the Trainer does; allowed on one rank only."""
        if read_placement().world_size > 1:
            raise ConfigError(
                "hyperparameter_search would draw other parameters on each rank; run "
                "it on one device, and train with what it has found"
            )
        return super().hyperparameter_search(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        model, loader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        steps, sampler = step_loader(
            getattr(loader, "base_dataloader", loader),
            self.args.gradient_accumulation_steps,
            shifts_labels=self._loss_shifts_labels,
        )
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        asked = SetupConfig(config=self._run_config, weight_of=items_of)
        _, _, shared = set_up(model, optimizer, steps, asked)
        self._epochs = StepEpochs(loader, shared, sampler)
        self.callback_handler.train_dataloader = self._epochs
        if (run := current_run()) is not None:
            hides = self.args.logging_nan_inf_filter
            self._step_losses = StepLosses(run.worker.group, hides_non_finite=hides)
            self._main_evaluation = MainEvaluation(run.worker.group)
        return model, self._epochs

    def _run_epoch(self, **kwargs: Any) -> None:
        # To resume inside an epoch the Trainer requests another loader of the same data
        # from Accelerate, which would not be shared.
        with patch.object(hf_trainer, "skip_first_batches", StepEpochs.skip):
            super()._run_epoch(**kwargs)
        if self._epochs is not None and self._epochs.is_under_way:
            if (run := current_run()) is not None:
                step = self.state.global_step
                run.collectives.barrier(
                    f"a callback's stop after step {step}, on all ranks and not on one"
                )
            self._epochs.leave()

    def get_batch_samples(
        self, epoch_iterator: Iterator[StepBatch], num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """Returns this rank's part of a step as ``num_batches`` batches.

        Pads with empty batches if the part has fewer micro-batches.
        """
        batch = next(epoch_iterator, None)
        if batch is None:
            return [], None
        pairs = list(zip(batch.parts, batch.items, strict=True))
        counted = [pair for pair in pairs if pair[1]]
        pairs = counted or [(part, 1.0) for part in batch.parts]
        total = sum(items for _, items in pairs)
        missing = num_batches - len(pairs)
        self._shares = [(0.0, None)] * missing
        for _, items in pairs:
            self._shares.append((items / total, items if batch.has_labels else None))
        if self._step_losses is not None:
            self._step_losses.begin_step(batch_weight())
        return [*({} for _ in range(missing)), *(part for part, _ in pairs)], None

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Adds a micro-batch's gradient; the step's last one starts the reduction."""
        share, items = self._shares.pop(0)
        if not share:
            return torch.zeros((), device=self.args.device)
        if items is not None:
            num_items_in_batch = torch.tensor(items, device=self.args.device)
        # The loss is a mean over the micro-batch, weighted by its share of the step.
        self.loss_is_scaled_for_ga = False
        self.current_gradient_accumulation_steps = 1.0 / share
        if (run := current_run()) is not None:
            run.hold(bool(self._shares))
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._step_losses is not None:
            self._step_losses.add(loss)
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating point operations of a micro-batch, which may be empty."""
        return int(super().floating_point_ops(inputs)) if inputs else 0

    def store_flos(self) -> None:
        """Sums the floating point operations of all ranks."""
        if (run := current_run()) is not None:
            flos = torch.tensor([self.current_flos], dtype=torch.float64, device="cpu")
            run.worker.group.all_reduce(flos, "summing floating point operations")
            self.current_flos: float = flos.item()
        super().store_flos()

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if self._epochs is not None:
            self._epochs.end()
        control, run = self.control, current_run()
        if run is not None and (control.should_evaluate or control.should_save):
            run.worker.is_cold = True  # the loop does other work too
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._set_mean_loss(tr_loss)
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._set_mean_loss(self._tr_loss)
        return super()._finalize_training(*args, **kwargs)

    def _set_mean_loss(self, tr_loss: torch.Tensor) -> None:
        """Replaces the sum of this rank's losses by the sum of steps' mean losses."""
        if self._step_losses is not None:
            tr_loss.fill_(self._step_losses.take())

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """In training evaluates on rank 0 and shares the metrics; else on each rank."""
        evaluation, evaluate = self._main_evaluation, super().evaluation_loop
        if evaluation is None:
            return evaluate(*args, **kwargs)
        made: list[Any] = []

        def on_rank_0() -> tuple[Any, int]:
            made.append(evaluate(*args, **kwargs))
            return made[0].metrics, made[0].num_samples

        metrics, samples = evaluation.run(on_rank_0)
        return made[0] if made else EvalLoopOutput(None, None, metrics, samples)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as the Trainer does; in training it notifies the waiting ranks."""
        if self._main_evaluation is not None:
            self._main_evaluation.tick()
        return super().prediction_step(*args, **kwargs)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Saves on the main rank; all ranks wait for a checkpoint of training."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and current_run() is not None:
            ranks.barrier()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads on rank 0; others keep their state, so that no ranks share masks."""
        if ranks.is_main_process():
            super()._load_rng_state(checkpoint)


class ElcheTrainer(ElcheTrainerMixin, Trainer):
    """``transformers.Trainer``; see `ElcheTrainerMixin`."""
