"""One contender of ``benchmarks.hetero``, as the program that every rank of it runs."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

import elche
from benchmarks.hetero.workloads import build_workload, optimizers_of
from elche.demo.contender import Contender, ContenderSpec, main
from elche.demo.workload import Order, Workload
from elche.runtime.run import Run

MODULE = "benchmarks.hetero.contender"


@dataclass(frozen=True, kw_only=True)
class BenchSpec(ContenderSpec):
    """Specification of a contender of a benchmark.

    Attributes:
        model: a workload's name.
        shares: relative shares of a batch per rank, for ``ddp-split``.
        max_seconds: leave the run after training for so long; elche's ranks together.
        optimizer: one of `benchmarks.hetero.workloads.OPTIMIZERS`.
        options: further settings of elche.
        sent_counter: a file that holds how many bytes a rank has sent, on each rank.
    """

    model: str
    shares: tuple[float, ...] = ()
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    sent_counter: str | None = None


class BenchContender(Contender):
    """One rank of a contender of a benchmark."""

    spec: BenchSpec
    _sent_bytes = 0

    def _build_workload(self) -> Workload:
        spec = self.spec
        text = Path(spec.text) if spec.text else None
        return build_workload(spec.model, spec.seed, spec.samples, text)

    def _make_optimizers(self) -> list[Optimizer]:
        return optimizers_of(self._workload, self._model, self.spec.optimizer)

    def _make_sampler(self) -> Order:
        """Of one part torch's own, the same order.

        With that a run survives the death of its first rank, which alone has the state
        of any other.
        """
        if self.spec.segments > 1:
            return super()._make_sampler()
        generator = torch.Generator().manual_seed(self.spec.seed)
        return RandomSampler(range(self.spec.samples), generator=generator)

    def _options(self) -> dict[str, Any]:
        return self.spec.options

    def _shares(self) -> list[float]:
        return list(self.spec.shares) or super()._shares()

    def _is_over(self) -> bool:
        is_over = super()._is_over()
        return elche.any(is_over) if self.spec.kind == "elche" else is_over

    def _segment(self, model: nn.Module, loader: Any) -> None:
        if not self._done_samples:
            self._sent_bytes = self._counted_bytes()
        super()._segment(model, loader)

    def _counted_bytes(self) -> int:
        counter = self.spec.sent_counter
        return 0 if counter is None else int(Path(counter).read_text())

    def _details(self, run: Run | None) -> dict[str, Any]:
        reports = [] if run is None else run.epochs.reports
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
