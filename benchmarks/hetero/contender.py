"""One contender of ``benchmarks.hetero``, as the program that every rank of it runs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

import elche
from benchmarks.hetero.delayed import DelayedTraining
from benchmarks.hetero.order import sampler_of
from benchmarks.hetero.time_cap import TimeCap
from benchmarks.hetero.workloads import OPTIMIZERS, build_workload, optimizers_of
from elche.config import DELAYED_SYNC
from elche.demo.batches import Order
from elche.demo.contender import KINDS, Contender, ContenderSpec, main
from elche.demo.workload import Workload
from elche.errors import ConfigError
from elche.runtime.run import Run

MODULE = "benchmarks.hetero.contender"


@dataclass(frozen=True, kw_only=True)
class BenchSpec(ContenderSpec):
    """Specification of a contender of a benchmark.

    Attributes:
        model: a workload's name.
        shares: relative shares of a batch per rank, for ``ddp-split``.
        max_seconds: leave the run after training for so long, all ranks together.
        learning_rate: instead of the workload's.
        optimizer: one of `OPTIMIZERS`.
        options: further settings of elche.
        sent_counter: a file that holds how many bytes a rank has sent, on each rank.
    """

    model: str
    shares: tuple[float, ...] = ()
    learning_rate: float | None = None
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    sent_counter: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer {self.optimizer!r}; choose one of"
                f" {', '.join(OPTIMIZERS)}"
            )

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """Kinds of contenders."""
        return (*KINDS, "ddp-split")


class BenchContender(Contender):
    """One rank of a contender of a benchmark.

    Args:
        spec: what to train.
        clock: seconds of this rank's clock.
    """

    spec: BenchSpec

    def __init__(
        self, spec: BenchSpec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(spec, clock)
        self._cap = self._time_cap()
        self._sent_bytes = 0

    def run(self) -> dict[str, Any]:
        """Trains, and returns this rank's results."""
        if self.spec.policy != DELAYED_SYNC:
            return super().run()
        training = DelayedTraining(
            self._workload,
            self._sampler,
            batch_size=self.spec.batch_size,
            optimizer=self.spec.optimizer,
            options=self.spec.options,
        )
        sent_bytes = self._counted_bytes()
        found = training.run(self.spec.max_seconds)
        return {
            **found,
            "device": self._placement.device_name,
            "sent_bytes": self._counted_bytes() - sent_bytes,
            "choices": [],
            **_windows_in_the_end(None),
        }

    def _build_workload(self) -> Workload:
        spec = self.spec
        text = Path(spec.text) if spec.text else None
        workload = build_workload(spec.model, spec.seed, spec.samples, text)
        rate = spec.learning_rate
        return workload if rate is None else replace(workload, learning_rate=rate)

    def _make_optimizers(self) -> list[Optimizer]:
        return optimizers_of(self._workload, self._model, self.spec.optimizer)

    def _make_sampler(self) -> Order:
        return sampler_of(self.spec.samples, self.spec.segments, self.spec.seed)

    def _options(self) -> dict[str, Any]:
        return self.spec.options

    def _shares(self) -> list[float]:
        return list(self.spec.shares) or super()._shares()

    def _time_cap(self) -> TimeCap:
        is_alone = self.spec.kind == "solo"
        word = None if is_alone else Path(self.spec.out) / "last-batch"
        meet: Callable[[], Any] = dist.barrier
        if self.spec.kind == "elche":
            meet = elche.barrier
        return TimeCap(self.spec.max_seconds, word, meet)

    def _is_last(self, train_s: float) -> bool:
        return self._cap.leaves_after(self._batches, train_s)

    def _is_over(self) -> bool:
        return self._cap.is_over(self._train_s)

    def _segment(self, model: nn.Module, loader: Any) -> None:
        if not self._batches:
            self._sent_bytes = self._counted_bytes()
        super()._segment(model, loader)

    def _counted_bytes(self) -> int:
        counter = self.spec.sent_counter
        return 0 if counter is None else int(Path(counter).read_text())

    def _details(self, run: Run | None) -> dict[str, Any]:
        reports = [] if run is None else run.reports
        epochs = [] if run is None else [*run.notifications.epoch_metrics]
        return {
            "sent_bytes": self._counted_bytes() - self._sent_bytes,
            "sync_s": sum(report.sync_s for report in reports),
            "busy_s": [
                sum(times) for times in zip(*(e.busy_s for e in epochs), strict=True)
            ],
            "shares": list(epochs[-1].shares) if epochs else [],
            "anchor": reports[-1].anchor if reports else None,
            **_windows_in_the_end(run),
        }


def _windows_in_the_end(run: Run | None) -> dict[str, Any]:
    """Windows of a run.

    ``window_samples`` is the median in the second half of the run, ``late_batches`` the
    mean there, per rank, of batches that ran before an average came. ``window_log`` has
    samples, seconds, and each rank's seconds in the synchronisation, by window.
    """
    windows = [] if run is None else list(run.notifications.window_metrics)
    second_half = windows[len(windows) // 2 :]
    samples = [window.samples for window in second_half]
    late = zip(*(window.late_batches for window in second_half), strict=True)
    return {
        "window_samples": statistics.median(samples) if samples else None,
        "late_batches": [statistics.fmean(each) for each in late],
        "window_log": [
            (window.samples, window.duration_s, *window.sync_wait_s)
            for window in windows
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1], BenchContender, BenchSpec)
