"""A `Trainer`'s recipe: makes model, optimizer, loader and loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.rank_settings import optimizers_of
from elche.session import ranks
from elche.trainer.trainer_config import TrainerConfig

ModelFn = Callable[[], nn.Module]
OptimizerFn = Callable[
    [Iterable[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]
LossFn = Callable[[Any, Any], torch.Tensor]


class Recipe:
    """Makes the objects of a training.

    Args:
        model_fn: makes the model.
        optimizer_fn: makes its optimizer, or several.
        loss_fn: function of output and target, or of model and batch.
        config: the settings.
        names_no_policy: whether the policy is the default.

    Raises:
        ConfigError: a function is not callable.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        optimizer_fn: OptimizerFn,
        loss_fn: LossFn,
        config: TrainerConfig,
        *,
        names_no_policy: bool,
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
        self.config = config
        self.names_no_policy = names_no_policy

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Computes the loss of a batch.

        Raises:
            ConfigError: the loss is not a scalar tensor, or the batch is not a pair.
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
            is_tensor = isinstance(loss, torch.Tensor)
            shape = f" of shape {list(loss.shape)}" if is_tensor else ""
            raise ConfigError(
                "expected loss_fn to return a scalar tensor, got "
                f"{type(loss).__name__}{shape}; take the mean over the batch"
            )
        return loss.reshape(())

    def build(
        self,
    ) -> tuple[nn.Module, tuple[torch.optim.Optimizer, ...], DataLoader[Any]]:
        """Makes this rank's model, optimizers and loader."""
        config = self.config
        if config.run.seed is not None:
            torch.manual_seed(config.run.seed)
        model = self._model_fn()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"expected model_fn to return a Module, got {model!r}")
        model.to(ranks.device())
        optimizers = optimizers_of(self._optimizer_fn(model.parameters()))
        loader: DataLoader[Any] = DataLoader(
            config.dataset,
            batch_size=config.batch_size,
            shuffle=None if config.is_stream else config.shuffle,
            drop_last=config.drop_last,
            collate_fn=config.collate_fn,
            num_workers=config.num_workers,
        )
        return model, optimizers, loader

    def weights(self) -> BatchWeights | None:
        """Weights of batches; None for their numbers of samples."""
        weight_of = self.config.weight_of
        return None if weight_of is None else BatchWeights(weight_of, ranks.rank())

    def loader_over(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """Makes a loader of evaluation batches."""
        config = self.config
        return DataLoader(
            dataset,
            batch_size=config.eval_batch_size or config.batch_size,
            collate_fn=config.collate_fn,
            num_workers=config.num_workers,
        )

    def mean_loss_of(self, model: nn.Module) -> Callable[[Any, float], torch.Tensor]:
        """Returns an evaluation step: the mean loss of a batch with a given weight."""
        is_sum = self.config.run.loss_reduction == "sum"

        def step(batch: Any, weight: float) -> torch.Tensor:
            if not weight:
                return torch.zeros((), device=ranks.device())
            loss = self.loss(model, batch)
            return loss.double() / weight if is_sum else loss

        return step


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""
