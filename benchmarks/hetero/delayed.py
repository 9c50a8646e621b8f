"""The contender ``elche-delayed_sync``: a loop that the `Trainer` owns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Subset

from benchmarks.hetero.workloads import optimizers_of
from elche.config import DELAYED_SYNC
from elche.demo.batches import Order
from elche.demo.workload import Workload, learning_rate_scale
from elche.errors import DeadlineError
from elche.runtime.emulation import EmulationHandle
from elche.session.process import current_emulation
from elche.trainer.trainer import Trainer


class DelayedTraining:
    """Trains as the other contenders do: same order, rates and cap on the time.

    Args:
        workload: what is trained.
        sampler: its order; the run has one part.
        batch_size: of all ranks together.
        optimizer: a kind that the workload knows.
        options: further settings of elche.
    """

    def __init__(
        self,
        workload: Workload,
        sampler: Order,
        *,
        batch_size: int,
        optimizer: str,
        options: dict[str, Any],
    ) -> None:
        self._workload = workload
        self._optimizer = optimizer
        self._model: nn.Module | None = None
        self._emulation: EmulationHandle | None = None
        self._trainer = Trainer(
            self._make_model,
            self._make_optimizers,
            self._loss,
            dataset=Subset(workload.train_dataset, list(sampler)),
            shuffle=False,
            batch_size=batch_size,
            epochs=1,
            drop_last=True,
            lr_schedule=learning_rate_scale,
            policy=DELAYED_SYNC,
            **options,
        )

    def run(self, max_seconds: float | None) -> dict[str, Any]:
        """This rank's results, without those that every contender has."""
        start_loss = self._workload.evaluate(self._workload.model_fn())
        handle = self._trainer.start()
        try:
            result = handle.join(max_seconds)
        except DeadlineError:
            result = handle.stop()
        model, emulation = self._model, self._emulation
        assert model is not None
        model.load_state_dict(result.model_state)
        report = result.report
        samples, seconds = report.samples, report.duration_s
        curve = [(0.0, 0.0, start_loss)]
        curve.append((seconds, samples, self._workload.evaluate(model)))
        return {
            "samples": samples,
            "train_s": seconds,
            "curve": curve,
            "nominal_s": emulation.nominal_s if emulation else 0.0,
            "overrun_s": emulation.overrun_s if emulation else 0.0,
            "windows": report.synchronisations,
            "sync_s": report.sync_s,
            "busy_s": report.busy_s,
            "shares": list(result.history[-1].shares),
            "anchor": None,
            "parameters": sum(p.numel() for p in model.parameters()),
        }

    def _make_model(self) -> nn.Module:
        self._model = self._workload.model_fn()
        return self._model

    def _make_optimizers(self, parameters: Any) -> Any:
        assert self._model is not None
        return optimizers_of(self._workload, self._model, self._optimizer)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._emulation = current_emulation()
        return self._workload.loss_fn(model, batch)
