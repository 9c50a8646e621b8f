"""Trainer configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset, IterableDataset
from typing_extensions import Required

from elche.config import PolicyName, RunConfig
from elche.config_checks import check_fields, check_known, check_whole
from elche.config_parts import refuse_former
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import WeightOf, check_weight_of
from elche.session.options import RunOptions, run_config
from elche.trainer.trainer_result import EpochRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Ends training when a metric has not improved for some epochs.

    The result keeps the model of the best epoch: ``result.best_state``.

    Attributes:
        metric: ``"eval_loss"``, ``"train_loss"`` or the name of a logged scalar.
        patience: number of epochs without improvement after which training ends.
        min_delta: smallest change that counts as an improvement.
        mode: ``"min"`` if lower is better, or ``"max"``.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_fields(self, whole={"patience": 1}, not_negative=("min_delta",))


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Data, duration and options of a `Trainer`.

    Attributes:
        dataset: items are ``(input, target)`` unless ``loss_fn`` takes the whole batch.
            An IterableDataset is divided as in `elche.setup`.
        batch_size: samples of a global batch under any policy; see `elche.setup`.
        epochs: number of passes over the dataset.
        samples_per_epoch: epoch length of an IterableDataset; None for its ``len()``.
        eval_dataset: map-style data set to evaluate after every epoch, if given.
        eval_batch_size: samples of an evaluation batch; None for ``batch_size``.
        shuffle: draw the samples in a new order every epoch; an IterableDataset keeps
            its own order.
        drop_last: drop an incomplete last batch.
        collate_fn: makes a batch of samples; None for torch's default.
        num_workers: data loader worker processes per rank.
        weight_of: weight of a batch, if the loss is a mean over something else
            than samples (tokens, say); see `elche.setup`. Mean losses, of training and
            of evaluation, are weighted by it.
        max_grad_norm: clip gradients to this norm, after the reduction.
        lr_schedule: factor on the learning rate as a function of progress in samples,
            0 to 1; the same on every rank, whatever its speed.
        lr_scale: constant factor on top of ``lr_schedule``.
        on_epoch_end: called on rank 0 with each `EpochRecord`, in the training thread.
            Its exceptions end the run on every rank and are raised by `Trainer.fit`, as
            in the user's own loop.
        on_checkpoint: called on rank 0 at the end of each epoch with its number and the
            consensus' state dict, on the CPU. Its exceptions are only logged: a full
            disk does not end the run.
        checkpoint_dir: folder for checkpoints of the whole run, for a resume; see
            `elche.save_every`. The launcher's folder (``elche run --checkpoint-dir``)
            overrides it.
        checkpoint_every_s: seconds between these checkpoints.
        resume: resume from the newest checkpoint in ``checkpoint_dir``, if any.
        early_stopping: ends training when a metric stops improving, on all ranks after
            the same epoch, and keeps the best model.
        run: settings of the run (policy, seed, and so on).
    """

    dataset: Dataset[Any]
    batch_size: int
    epochs: int
    samples_per_epoch: int | None = None
    eval_dataset: Dataset[Any] | None = None
    eval_batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    weight_of: WeightOf | None = None
    max_grad_norm: float | None = None
    lr_schedule: Callable[[float], float] | None = None
    lr_scale: float = 1.0
    on_epoch_end: Callable[[EpochRecord], None] | None = None
    on_checkpoint: Callable[[int, dict[str, Any]], None] | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_every_s: float = 600.0
    resume: bool = False
    early_stopping: EarlyStopping | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_fields(
            self,
            whole={"batch_size": 1, "epochs": 1},
            positive=("lr_scale", "max_grad_norm"),
        )
        if self.weight_of is not None:
            check_weight_of(self.weight_of)
        length = self.num_samples
        if length == 0:
            raise ConfigError("the dataset is empty; expected at least one sample")
        if self.drop_last and length < self.batch_size:
            raise ConfigError(
                f"drop_last leaves nothing of {length} samples in batches of "
                f"{self.batch_size}"
            )
        for name in ("on_epoch_end", "on_checkpoint"):
            call = getattr(self, name)
            if call is not None and not callable(call):
                raise ConfigError(f"expected {name} to be callable, got {call!r}")
        if self.resume and self.checkpoint_dir is None:
            raise ConfigError(
                "resume=True needs checkpoint_dir=, the folder to look in"
            )
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        data, stopping = self.eval_dataset, self.early_stopping
        if isinstance(data, IterableDataset):
            raise ConfigError(
                "expected eval_dataset to be map-style, got an IterableDataset; its "
                "parts are evaluated by index"
            )
        if data is not None and len(data) == 0:  # type: ignore[arg-type]
            raise ConfigError("eval_dataset is empty; expected a sample, or None")
        if stopping is None:
            return
        if not isinstance(stopping, EarlyStopping):
            raise ConfigError(
                "expected early_stopping to be an elche.trainer.EarlyStopping, got "
                f"{stopping!r}"
            )
        if stopping.metric == "eval_loss" and data is None:
            raise ConfigError(
                "early stopping watches 'eval_loss', and there is no eval_dataset; "
                "give one, or EarlyStopping(metric='train_loss')"
            )

    @property
    def is_stream(self) -> bool:
        """True if the data set is an IterableDataset."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch, including an incomplete last batch.

        Raises:
            ConfigError: the length is unknown, or samples_per_epoch is set for a data
                set that is not an IterableDataset.
        """
        if self.samples_per_epoch is not None:
            check_whole("samples_per_epoch", self.samples_per_epoch, 1)
            if not self.is_stream:
                raise ConfigError(
                    "samples_per_epoch is only for an IterableDataset, got "
                    f"{type(self.dataset).__name__}"
                )
            return self.samples_per_epoch
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(
                "expected a map-style dataset with __len__ and __getitem__, or an "
                "IterableDataset with __len__ or samples_per_epoch, got "
                f"{type(self.dataset).__name__}"
            ) from error


class TrainerOptions(RunOptions, total=False):
    """Keywords of `elche.Trainer`: run settings, and fields of `TrainerConfig`."""

    policy: PolicyName
    config: RunConfig | None
    dataset: Required[Dataset[Any]]
    batch_size: Required[int]
    epochs: Required[int]
    samples_per_epoch: int | None
    eval_dataset: Dataset[Any] | None
    eval_batch_size: int | None
    shuffle: bool
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    weight_of: WeightOf | None
    max_grad_norm: float | None
    lr_schedule: Callable[[float], float] | None
    lr_scale: float
    on_epoch_end: Callable[[EpochRecord], None] | None
    on_checkpoint: Callable[[int, dict[str, Any]], None] | None
    checkpoint_dir: str | Path | None
    checkpoint_every_s: float
    resume: bool
    early_stopping: EarlyStopping | None


def trainer_config(options: Mapping[str, Any]) -> TrainerConfig:
    """Splits keyword options into options of the trainer and of the run.

    Raises:
        ConfigError: an option is unknown, missing or wrong.
    """
    own = set(TrainerConfig.__dataclass_fields__) - {"run"}
    refuse_former(options.keys() - own)
    run_fields = set(RunConfig.__dataclass_fields__)
    check_known(set(options) - {"config"}, own | run_fields)
    missing = [
        name for name in ("dataset", "batch_size", "epochs") if name not in options
    ]
    if missing:
        raise ConfigError(f"Trainer needs {', '.join(missing)}")
    run = run_config(
        options.get("config"),
        {name: options[name] for name in options if name in run_fields - own},
    )
    mine = {name: options[name] for name in options if name in own}
    norm = mine.setdefault("max_grad_norm", run.windows.max_grad_norm)
    if run.sums_gradients:
        run = replace(run, windows=replace(run.windows, max_grad_norm=norm))
    return TrainerConfig(**mine, run=run)
