"""Equal ranks: elche's DistributedDataParallel against torch's on gloo, in pairs.

    python -m benchmarks.ddp --pairs 10
    python -m benchmarks.ddp --pairs 10 --transport gloo

Both train the same models on the same ranks of one machine, in turn: a pair is one
segment of each, in alternating order, each with a model, optimizer and wrapper of its
own, some steps to warm up (torch's buckets are rebuilt in the second, elche's after the
first) and some that are timed between two barriers. The table shows the median step and
the geometric mean of the ratios of throughputs (above 1: elche is faster) with its 95 %
interval over the pairs.

Ranks are emulated devices of speed 1 (1.25 ms per sample, slept beside real compute,
`elche.runtime.emulation`), wrapped alike; with ``--ms-per-sample 0`` they
compute at real speed, and two ranks then need two idle cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing, nn

from benchmarks.hetero.workloads import build_workload
from benchmarks.paired import mean_interval
from elche.ddp.wrapper import DistributedDataParallel
from elche.demo.workload import Batch, Workload
from elche.runtime.emulation import EmulationConfig, emulate

CONTENDERS = ("torch", "elche")
BATCHES = 8
WARM_STEPS = 5
"""Untimed, at the beginning of a segment."""
GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Job:
    """What all ranks run.

    Attributes:
        models: workloads, by name.
        ranks: equal devices.
        pairs: segments of each contender per model.
        steps: timed steps of a segment.
        batch_size: samples of a rank's batch.
        ms_per_sample: of an emulated device; 0 for real speed.
        transport: of elche's; ``"auto"`` is shared memory on one machine.
        folder: where ranks meet and rank 0 writes.
    """

    models: tuple[str, ...]
    ranks: int
    pairs: int
    steps: int
    batch_size: int
    ms_per_sample: float
    transport: str
    folder: str


def wrapper_of(name: str, job: Job) -> Callable[[nn.Module], nn.Module]:
    """The contender's wrapper, as a script would make it."""
    if name == "torch":
        return nn.parallel.DistributedDataParallel
    return partial(DistributedDataParallel, transport=job.transport)


def batches_of(workload: Workload, job: Job, rank: int) -> list[Batch]:
    """A rank's batches, made before anything is timed."""
    made = []
    for number in range(BATCHES):
        first = (number * job.ranks + rank) * job.batch_size
        items = [workload.train_dataset[first + i] for i in range(job.batch_size)]
        inputs, targets = zip(*items, strict=True)
        made.append((torch.stack(inputs), torch.stack(targets)))
    return made


def segment(
    workload: Workload, batches: list[Batch], name: str, job: Job
) -> tuple[float, float]:
    """Seconds per step, and a checksum of what was trained."""
    model = workload.model_fn()
    emulation = None
    if job.ms_per_sample:
        config = EmulationConfig(speed=1.0, ms_per_sample=job.ms_per_sample)
        emulation = emulate(model, config)
    ddp = wrapper_of(name, job)(model)
    optimizer = workload.optimizer_fn(ddp.parameters())
    for step in range(WARM_STEPS + job.steps):
        if step == WARM_STEPS:
            dist.barrier()
            began_s = time.perf_counter()
        loss = workload.loss_fn(ddp, batches[step % BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    took_s = (time.perf_counter() - began_s) / job.steps
    if emulation is not None:
        emulation.remove()
    with torch.no_grad():
        return took_s, sum(float(p.double().abs().sum()) for p in model.parameters())


def rank_main(rank: int, job: Job) -> None:
    """One rank: all models, all pairs."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(job.folder) / "store"), job.ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    found: dict[str, list[dict[str, float]]] = {}
    for model_name in job.models:
        samples = BATCHES * job.ranks * job.batch_size
        workload = build_workload(model_name, num_samples=samples)
        batches = batches_of(workload, job, rank)
        found[model_name] = []
        for number in range(job.pairs):
            pair: dict[str, float] = {}
            sums: dict[str, float] = {}
            for name in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
                pair[name], sums[name] = segment(workload, batches, name, job)
            if not math.isclose(sums["torch"], sums["elche"], rel_tol=1e-3):
                raise RuntimeError(f"{model_name}: trained different models: {sums}")
            found[model_name].append(pair)
    if rank == 0:
        Path(job.folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def report(found: dict[str, list[dict[str, float]]]) -> None:
    """Prints the table."""
    print(f"{'model':6} {'torch ms':>9} {'elche ms':>9} {'ratio':>7}  95 % interval")
    for name, pairs in found.items():
        steps_ms = {
            each: 1e3 * statistics.median(pair[each] for pair in pairs)
            for each in CONTENDERS
        }
        interval = mean_interval(
            [math.log(pair["torch"] / pair["elche"]) for pair in pairs]
        )
        ratio, low, high = map(math.exp, (interval.mean, interval.low, interval.high))
        shown = f"{low:.3f} to {high:.3f}" if len(pairs) > 1 else "one pair"
        times = f"{steps_ms['torch']:9.2f} {steps_ms['elche']:9.2f}"
        print(f"{name:6} {times} {ratio:7.3f}  {shown}")


def main() -> int:
    """Runs all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,cnn,gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--ms-per-sample", type=float, default=1.25)
    parser.add_argument("--transport", choices=["auto", "gloo"], default="auto")
    chosen = vars(parser.parse_args())
    models = tuple(chosen.pop("models").split(","))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(models=models, folder=folder, **chosen)
        multiprocessing.start_processes(
            rank_main, args=(job,), nprocs=job.ranks, start_method="spawn"
        )
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
