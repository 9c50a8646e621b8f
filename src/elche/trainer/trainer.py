"""`elche.Trainer`: the library owns the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.data import Dataset
from typing_extensions import Unpack

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.runtime.process.stop_signals import SignalStops, StopRequest
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.training import SetupConfig
from elche.session.options import names_no_policy
from elche.session.process import failing_together, refuse_beside, shutdown
from elche.session.setup import set_up
from elche.trainer.evaluation import evaluate_by, predict
from elche.trainer.fitting import Fitting
from elche.trainer.handle import TrainingHandle
from elche.trainer.recipe import LossFn, ModelFn, OptimizerFn, Recipe
from elche.trainer.trainer_config import TrainerOptions, trainer_config
from elche.trainer.trainer_result import TrainResult


class Trainer:
    """Trains a model on all ranks of this run.

    Args:
        model_fn: makes the model; called once on every rank, which then adopts rank 0's
            parameters.
        optimizer_fn: makes the optimizer from the model's parameters, or a list of
            optimizers, which are stepped one after another.
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
        model_fn: ModelFn,
        optimizer_fn: OptimizerFn,
        loss_fn: LossFn,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.config = trainer_config(options)
        self._recipe = Recipe(
            model_fn,
            optimizer_fn,
            loss_fn,
            self.config,
            names_no_policy=names_no_policy(options.get("config"), options),
        )
        self._is_fitting = False
        self._state: dict[str, Any] | None = None

    def fit(self) -> TrainResult:
        """Trains for all epochs; every rank must call it.

        SIGINT (Ctrl-C) and SIGTERM end it after the current batch, on all ranks, with a
        result (``result.stopped_by``); a second signal has its usual effect. This
        requires a call in the main thread, a script without handlers of its own, and
        connected ranks. If checkpoints are made by time (``checkpoint_dir=``, or the
        launcher's), a last one is made with everything granted to ranks by then. An
        evaluation in progress is interrupted. Under `elche run` all of that, and the
        rest of the script, has 30 s.

        Returns:
            The consensus and the run's records, the same on every rank.

        Raises:
            ConfigError: the loss is not a scalar, or an argument is wrong.
            MismatchError: ranks disagree about model, data or settings.
            NonFiniteError: a rank's update was not finite twice in a row, or the
                parameters are NaN under ``sync``; see `elche.WindowConfig.non_finite`.
            RemoteRankError: another rank failed.
            CommunicationError: the ranks did not connect, or lost their connections;
                `DeadlineError` if a wait took longer than ``timeout_s``.
        """
        return self._fit(StopRequest())

    def start(self) -> TrainingHandle:
        """Trains like `fit`, in a thread; every rank must call it.

        Model, callbacks and loss function run in that thread. torch's per-thread state
        (``torch.autocast``, ``torch.device`` as a context) is not passed to it.

        Raises:
            ConfigError: another Trainer is training in this process.
        """
        handle = TrainingHandle(self._fit)
        handle.begin()
        return handle

    def evaluate(
        self, dataset: Dataset[Any], *, state: dict[str, Any] | None = None
    ) -> float:
        """The mean loss over a data set; see `elche.evaluate`. Every rank calls it.

        Args:
            dataset: map-style data set, with items as in training.
            state: state of the model, such as ``result.best_state``; None for the last
                result of `fit`. Rank 0's state is used.

        Returns:
            The mean by samples, or by ``weight_of``; the same on every rank.

        Raises:
            ConfigError: `fit` is in progress, or the data set cannot be divided.
            ElcheError: as `fit`.
        """
        loader = self._recipe.loader_over(dataset)
        with self._model_in_run(state) as model:
            weights = self._recipe.weights()
            loss: float = evaluate_by(self._recipe.mean_loss_of(model), loader, weights)
        return loss

    def predict(
        self,
        dataset: Dataset[Any],
        *,
        step: Callable[[nn.Module, Any], Any] | None = None,
        state: dict[str, Any] | None = None,
        on: Literal["all", "main"] = "all",
    ) -> Any:
        """Predictions for every item, in order; see `elche.predict`.

        Args:
            dataset: map-style data set. If a batch is a pair, the model receives its
                first part.
            step: ``step(model, batch)`` to use instead of the model.
            state: as in `evaluate`.
            on: ``"all"`` ranks receive the rows, or ``"main"``, rank 0 alone.

        Raises:
            ConfigError: `fit` is in progress, or the data set cannot be divided.
            ElcheError: as `fit`.
        """
        loader = self._recipe.loader_over(dataset)
        with self._model_in_run(state) as model:
            return predict(partial(step or _output, model), loader, on=on)

    def _fit(
        self,
        stops: StopRequest,
        heeds_signals: bool = False,
        take_view: Callable[[MetricsView], None] = lambda view: None,
    ) -> TrainResult:
        """Trains, and polls the stop request between batches."""
        refuse_beside()
        signals = SignalStops(stops)
        self._is_fitting = True
        try:
            with failing_together():
                stops.check()
                fitting = Fitting(self._recipe, stops)
                take_view(fitting.metrics)
                heeds_signals |= signals.open()
                result = fitting.run(heeds_signals=heeds_signals)
            shutdown()
        finally:
            self._is_fitting = False
            signals.close()
        self._state = result.model_state
        return result

    @contextlib.contextmanager
    def _model_in_run(self, state: dict[str, Any] | None) -> Iterator[nn.Module]:
        """Context with the model on all ranks, in a run without training."""
        if self._is_fitting:
            raise ConfigError(
                "evaluate and predict need all ranks for themselves; call them when "
                "fit() has returned, or give eval_dataset"
            )
        refuse_beside()
        model, optimizers, loader = self._recipe.build()
        state = self._state if state is None else state
        if state is not None:
            model.load_state_dict(state)
        run = self.config.run
        config = RunConfig(timeout_s=run.timeout_s, transport=run.transport)
        per_epoch = self.config.samples_per_epoch
        asked = SetupConfig(config=config, samples_per_epoch=per_epoch)
        with failing_together():
            model, *_ = set_up(model, optimizers, loader, asked)
            yield model.eval()
        shutdown()


def _output(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, list | tuple) else batch)
