"""One contender of a comparison, as the program that each of its ranks runs.

All contenders share one loop, one data order, one learning rate rule and one
emulation; they differ in the setup by `Contender`. The clock of a run is rank 0's (a
rank that trains alone has its own). It stops during evaluation of the held-out set, for
every contender equally.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elche.config import PolicyName
from elche.demo.workload import (
    BATCH_SIZE,
    GPT_MODEL,
    Order,
    SegmentSampler,
    SplitBatches,
    Workload,
    language_workload,
    learning_rate_scale,
)
from elche.devices.streams import synchronize
from elche.runtime.data.transfer import to_device
from elche.runtime.emulation import EmulationHandle, emulate
from elche.runtime.process.environment import read_placement
from elche.runtime.run import Run
from elche.session.process import current_run, process, shutdown
from elche.session.progress import progress_samples
from elche.session.setup import setup

DDP_TIMEOUT_S = 120.0
PROGRESS_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ContenderSpec:
    """Kind, data and settings of a contender.

    Attributes:
        kind: ``solo`` (each rank trains alone), ``ddp`` or ``elche``.
        out: directory for results.
        batch_size: samples of a batch; for DDP of all ranks together.
        segments: number of parts of the run, each followed by an evaluation.
        text: file or directory to learn.
        max_seconds: time limit (s) of ``solo`` training.
    """

    kind: str
    samples: int
    out: str = ""
    batch_size: int = BATCH_SIZE
    segments: int = 1
    seed: int = 0
    text: str | None = None
    policy: str = "sync"
    max_seconds: float | None = None


class Contender:
    """One rank of a contender. Benchmarks may subclass it for other workloads."""

    def __init__(
        self, spec: ContenderSpec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._placement = read_placement()
        self._rank = self._placement.rank
        self._reports = self._rank == 0 or spec.kind == "solo"
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.manual_seed(spec.seed)
        self._workload = self._build_workload()
        self._model = self._workload.model_fn().to(self._placement.device)
        self._optimizers = self._make_optimizers()
        groups = [group for each in self._optimizers for group in each.param_groups]
        self._rates = [(group, float(group["lr"])) for group in groups]
        self._sampler = self._make_sampler()
        self._emulation: EmulationHandle | None = None
        self._loss_scale = 1.0
        self._done_samples = 0
        self._train_s = self._starved_s = 0.0
        self._curve: list[tuple[float, float, float]] = []
        self._reported_s = 0.0

    def run(self) -> dict[str, Any]:
        """Trains, and returns this rank's results."""
        model, loader = self._model, self._plain_loader()
        if self.spec.kind == "elche":
            model, loader = self._elche(loader)
        elif self.spec.kind == "solo":
            self._emulate()
        else:
            model, loader = self._ddp()
        self._evaluate()
        for _ in range(self.spec.segments):
            self._segment(model, loader)
            if self._is_over():
                break
            self._evaluate()
        result = self._result()
        if dist.is_initialized():
            del model
            dist.barrier()
            dist.destroy_process_group()
        return result

    def _build_workload(self) -> Workload:
        text = Path(self.spec.text) if self.spec.text else None
        return language_workload(
            "gpt", GPT_MODEL, self.spec.seed, self.spec.samples, text
        )

    def _make_optimizers(self) -> list[Optimizer]:
        return [self._workload.optimizer_fn(self._model.parameters())]

    def _make_sampler(self) -> Order:
        return SegmentSampler(self.spec.samples, self.spec.segments, self.spec.seed)

    def _options(self) -> dict[str, Any]:
        """Further options of `elche.setup`."""
        return {}

    def _shares(self) -> list[float]:
        """Relative shares of a batch per rank under DDP."""
        return [1.0] * self._placement.world_size

    def _is_last(self, train_s: float) -> bool:
        """True if this rank stops after this many seconds of training."""
        limit_s = self.spec.max_seconds
        return limit_s is not None and train_s >= limit_s

    def _is_over(self) -> bool:
        """True if all ranks stop after the current part of the run."""
        return self._is_last(self._train_s)

    def _emulate(self) -> None:
        if (config := self._placement.emulation) is not None:
            self._emulation = emulate(self._model, config)

    def _plain_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._workload.train_dataset,
            batch_size=self.spec.batch_size,
            sampler=self._sampler,
            drop_last=True,
        )

    def _ddp(self) -> tuple[nn.Module, Any]:
        """Wraps the model in torch's DistributedDataParallel, with split batches."""
        world_size = self._placement.world_size
        store = dist.FileStore(str(Path(self.spec.out) / "ddp-store"), world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self._rank,
            world_size=world_size,
            timeout=timedelta(seconds=DDP_TIMEOUT_S),
        )
        self._emulate()
        size, shares = self.spec.batch_size, self._shares()
        batches = SplitBatches(self._sampler, size, shares, self._rank)
        self._loss_scale = batches.part_size * world_size / size
        loader = DataLoader(self._workload.train_dataset, batch_sampler=batches)
        return nn.parallel.DistributedDataParallel(self._model), loader

    def _elche(self, loader: DataLoader[Any]) -> tuple[nn.Module, Any]:
        model, _, shared = setup(
            self._model,
            self._optimizers,
            loader,
            epochs=self.spec.segments,
            policy=cast("PolicyName", self.spec.policy),
            **self._options(),
        )
        self._emulation = process.emulation
        return model, shared

    def _segment(self, model: nn.Module, loader: Any) -> None:
        """Trains one part of the run: the loop of `elche.setup`'s docstring, timed."""
        if "ddp" in self.spec.kind:
            dist.barrier()  # rank 0 evaluates; elche waits by itself
        began_s, starved_s = self._clock(), starved_total_s()
        for batch in loader:
            if self._placement.device.type != "cpu":  # elche has moved its batches
                batch = to_device(batch, self._placement.device)
            progress = min(1.0, self._progress_samples() / self.spec.samples)
            for group, rate in self._rates:
                group["lr"] = rate * learning_rate_scale(progress)
            loss = self._workload.loss_fn(model, batch) * self._loss_scale
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self._count(len(batch[0]))
            if self._is_last(self._train_s + self._clock() - began_s):
                break
        synchronize(self._placement.device)
        self._train_s += self._clock() - began_s
        self._starved_s += starved_total_s() - starved_s
        self._done_samples = self._progress_samples()

    def _count(self, samples: int) -> None:
        """Counts a batch, and reports progress at intervals."""
        now_s = self._clock()
        is_whole = "ddp" in self.spec.kind
        self._done_samples += self.spec.batch_size if is_whole else samples
        if self._reports and now_s - self._reported_s > PROGRESS_EVERY_S:
            self._reported_s = now_s
            print(json.dumps({"done": self._progress_samples()}), flush=True)

    def _progress_samples(self) -> int:
        if current_run() is None:
            return self._done_samples
        return round(progress_samples())

    def _evaluate(self) -> None:
        """Evaluates the held-out loss; other ranks wait before their next part."""
        if not self._reports:
            return
        loss = self._workload.evaluate(self._model)
        self._curve.append((self._train_s, float(self._done_samples), loss))
        print(json.dumps({"done": self._done_samples, "loss": loss}), flush=True)

    def _result(self) -> dict[str, Any]:
        run, emulation = current_run(), self._emulation
        reports = [] if run is None else run.epochs.reports
        return {
            "samples": self._done_samples,
            "train_s": self._train_s,
            "curve": self._curve,
            "device": self._placement.device_name,
            "nominal_s": emulation.nominal_s if emulation else 0.0,
            "overrun_s": emulation.overrun_s if emulation else 0.0,
            "starved_s": self._starved_s,
            "windows": sum(report.windows for report in reports),
            "choices": [] if run is None else run.notifications.choices,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            **self._details(run),
        }

    def _details(self, run: Run | None) -> dict[str, Any]:
        """Further results of this rank; ``run`` is elche's run, if any."""
        return {}


def starved_total_s() -> float:
    """Time (s) that this thread has waited for a core; 0 if the system has no count."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def main(
    path: str,
    kind: type[Contender] = Contender,
    spec_type: type[ContenderSpec] = ContenderSpec,
) -> None:
    """Runs the contender specified in the file; writes ``result-RANK.json``.

    Standard error of a rank goes to ``stderr-RANK.txt``, because the parent process may
    show a progress bar. The parent prints the end of the file if the rank fails.
    """
    spec = spec_type(**json.loads(Path(path).read_text()))
    rank = read_placement().rank
    with (Path(spec.out) / f"stderr-{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    result = kind(spec).run()
    (Path(spec.out) / f"result-{rank}.json").write_text(json.dumps(result))
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
