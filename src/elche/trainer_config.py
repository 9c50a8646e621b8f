"""What a `Trainer` is told, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.utils.data import Dataset

from elche import session
from elche.config import RunConfig
from elche.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What a `Trainer` trains on, and for how long.

    Attributes:
        dataset: map-style; items are ``(input, target)`` unless ``loss_fn`` takes the
            batch itself.
        batch_size: samples of a global batch (``sync``) or of a local step.
        epochs: passes over the dataset.
        eval_dataset: evaluated after every epoch, if given.
        eval_batch_size: samples of an evaluation batch; None for ``batch_size``.
        shuffle: draw the samples in a new order every epoch.
        drop_last: leave out an incomplete last batch.
        collate_fn: makes a batch of samples; None for torch's default.
        num_workers: loading processes of each rank.
        max_grad_norm: clip gradients to this norm (after the reduction).
        lr_schedule: factor on the learning rate as a function of progress in samples,
            0 to 1; the same on every rank, whatever its speed.
        on_epoch_end: called on rank 0 with each `EpochRecord`.
        run: settings of the run (policy, seed, and so on).
    """

    dataset: Dataset[Any]
    batch_size: int
    epochs: int
    eval_dataset: Dataset[Any] | None = None
    eval_batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    max_grad_norm: float | None = None
    lr_schedule: Callable[[float], float] | None = None
    on_epoch_end: Callable[[EpochRecord], None] | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} to be an int >= 1, got {value!r}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"expected a positive max_grad_norm, got {self.max_grad_norm!r}"
            )
        try:
            length = len(self.dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(
                "expected a map-style dataset with __len__ and __getitem__, got "
                f"{type(self.dataset).__name__}"
            ) from error
        if length == 0:
            raise ConfigError("the dataset is empty; expected at least one sample")
        if self.drop_last and length < self.batch_size:
            raise ConfigError(
                f"drop_last leaves nothing of {length} samples in batches of "
                f"{self.batch_size}"
            )
        if self.eval_dataset is not None and len(self.eval_dataset) == 0:  # type: ignore[arg-type]
            raise ConfigError("eval_dataset is empty; expected a sample, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """What an epoch brought.

    Attributes:
        epoch: counted from 0.
        train_loss: mean over all samples of all ranks.
        eval_loss: of the consensus, None without an evaluation set.
        samples: trained on by all ranks.
        duration_s: of training, without evaluation.
        samples_per_s: of the whole run.
        shares: each rank's part of the samples.
    """

    epoch: int
    train_loss: float
    eval_loss: float | None
    samples: int
    duration_s: float
    samples_per_s: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """How the run went.

    Attributes:
        policy: the policy.
        world_size: ranks.
        samples: trained on by all ranks in all epochs.
        duration_s: of training, without evaluation.
        samples_per_s: of the whole run.
        busy_s: delivered time per rank (data wait, transfer and compute).
        data_wait_s: of it, waiting for data.
        sync_s: in reductions.
        synchronisations: how many.
        anchor: of El Che at the end (1 under ``sync``).
    """

    policy: str
    world_size: int
    samples: int
    duration_s: float
    samples_per_s: float
    busy_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    sync_s: float
    synchronisations: int
    anchor: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What `Trainer.fit` returns, the same on every rank.

    Attributes:
        model_state: state dict of the consensus, on the CPU.
        history: a record per epoch.
        report: how the run went.
    """

    model_state: dict[str, Any]
    history: list[EpochRecord]
    report: RunReport


def trainer_config(options: dict[str, Any]) -> TrainerConfig:
    """Sorts keyword options into those of the trainer and those of the run.

    Raises:
        ConfigError: an option is unknown, missing or wrong.
    """
    own = set(TrainerConfig.__dataclass_fields__) - {"run"}
    run_fields = set(RunConfig.__dataclass_fields__)
    unknown = sorted(set(options) - own - run_fields - {"config"})
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r}; known are: "
            f"{', '.join(sorted(own | run_fields))}"
        )
    missing = [
        name for name in ("dataset", "batch_size", "epochs") if name not in options
    ]
    if missing:
        raise ConfigError(f"Trainer needs {', '.join(missing)}")
    run_options = {name: options[name] for name in options if name in run_fields}
    run = session.run_config(options.get("config"), run_options)
    return TrainerConfig(
        run=run, **{name: options[name] for name in options if name in own}
    )
