"""One rank of `benchmarks.pipeline`: elche and torch in turn, on the same device.

All contenders train the same layers on the same batch over gloo. What makes a stage
of either slow is `EmulatedStage`: it goes around the calls that do a stage's forward,
its input gradient and its weight gradient, sleeps until the declared time is over, and
notes when the call began and ended. Messages are outside of these calls for both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline.plan import (
    BY_HAND,
    CONTENDERS,
    ELCHE,
    TORCH_CONTENDERS,
    PipelineBenchConfig,
    make_bench_plan,
)
from elche.pipeline.pipeline import Pipeline
from elche.runtime.process.environment import read_placement
from elche.schedule.actions import loop_placement, v_placement

WIDTH = 32
SAMPLES = 2
TIMEOUT_S = 120.0
WARM_STEPS = 2

Seconds = Callable[..., float]


class Block(nn.Module):
    """A small layer; its real compute hides in the declared time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to the residual stream."""
        y: torch.Tensor = self.narrow(F.gelu(self.widen(self.norm(x))))
        return x + y


@final
class EmulatedStage:
    """Stretches the calls of a stage to declared times.

    Attributes:
        spans: begin and end of each call, time.monotonic().
        overrun_s: time by which real compute exceeded the declared one.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.overrun_s = 0.0

    def around(self, stage: object, calls: Mapping[str, Seconds]) -> None:
        """Replaces methods of a stage.

        Args:
            stage: of torch or of elche.
            calls: by name of the method, what a call of it takes in seconds, given its
                arguments.
        """
        for name, seconds in calls.items():
            setattr(stage, name, self._stretched(getattr(stage, name), seconds))

    def reset(self) -> None:
        """Forgets what was measured."""
        self.spans, self.overrun_s = [], 0.0

    def _stretched(self, call: Callable[..., Any], seconds: Seconds) -> Any:
        def stretched(*args: Any, **keywords: Any) -> Any:
            begin_s = time.monotonic()
            found = call(*args, **keywords)
            left_s = begin_s + seconds(*args, **keywords) - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            else:
                self.overrun_s -= left_s
            self.spans.append((begin_s, time.monotonic()))
            return found

        return stretched


@dataclass(frozen=True)
class _Contender:
    step: Callable[[], object]
    parameters: list[nn.Parameter]


@final
class PipelineContenders:
    """All contenders on one rank.

    Args:
        config: what is measured.
        folder: where the ranks of torch meet.
    """

    def __init__(self, config: PipelineBenchConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._rank = read_placement().rank
        self._emulated = EmulatedStage()
        generator = torch.Generator().manual_seed(0)
        samples = SAMPLES * config.microbatches
        self._batch = torch.randn(samples, WIDTH, generator=generator)
        self._target = torch.randn(samples, WIDTH, generator=generator)

    def run(self) -> dict[str, Any]:
        """Measures; returns, by contender, what each repetition gave on this rank."""
        store = dist.FileStore(str(self._folder / "store"), self._config.num_ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self._rank,
            world_size=self._config.num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        try:
            with self._pipeline() as pipe:
                torch_names = (*TORCH_CONTENDERS, *BY_HAND)
                ready = {name: self._torch(name) for name in torch_names}
                ready[ELCHE] = self._elche(pipe)
                return self._measure(ready)
        finally:
            dist.destroy_process_group()

    def _measure(self, ready: dict[str, _Contender]) -> dict[str, Any]:
        results: dict[str, list[Any]] = {name: [] for name in CONTENDERS}
        for repetition in range(WARM_STEPS + self._config.repetitions):
            first = repetition % len(CONTENDERS)
            for name in (*CONTENDERS[first:], *CONTENDERS[:first]):
                found = self._step(ready[name])
                if repetition >= WARM_STEPS:
                    results[name].append(found)
            if self._rank == 0:
                done = max(0, repetition + 1 - WARM_STEPS)
                print(json.dumps({"done": done}), flush=True)
        return results

    def _step(self, one: _Contender) -> dict[str, float]:
        for parameter in one.parameters:
            parameter.grad = None
        self._emulated.reset()
        dist.barrier()
        one.step()
        spans = self._emulated.spans
        return {
            "begin_s": min(begin for begin, _ in spans),
            "end_s": max(end for _, end in spans),
            "busy_s": sum(end - begin for begin, end in spans),
            "overrun_s": self._emulated.overrun_s,
        }

    def _layers(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block() for _ in range(self._config.layers)]

    def _pipeline(self) -> Pipeline:
        plan = make_bench_plan(self._config)
        return Pipeline(
            self._layers(),
            F.mse_loss,
            micro_batches=self._config.microbatches,
            schedule=plan.schedule,
            partition=plan.sizes,
            costs=plan.costs,
            timeout_s=TIMEOUT_S,
        )

    def _elche(self, pipe: Pipeline) -> _Contender:
        sizes = make_bench_plan(self._config).sizes
        for index, runner in pipe.stages.items():
            seconds = sizes[index] * self._config.layer_s(self._rank)
            self._emulated.around(
                runner,
                {
                    name: lambda *_, seconds=seconds: seconds
                    for name in ("forward", "backward_input", "backward_weight")
                },
            )
        batch = self._batch if pipe.is_first else None
        target = self._target if pipe.is_last else None
        return _Contender(lambda: pipe.step(batch, target), list(pipe.parameters()))

    def _torch(self, name: str) -> _Contender:
        """One of torch's schedules, on an equal split or the best one by hand."""
        schedule = name.removesuffix(" by hand")
        placement = torch_placement(schedule, self._config.num_ranks)
        sizes = self._config.equal_split(len(placement))
        if name in BY_HAND:
            sizes = self._config.split_by_hand(placement)
        stages = torch_stages(self._layers(), sizes, placement, self._rank)
        for stage in stages:
            self._emulated.around(stage, self._torch_calls(sizes[stage.stage_index]))
        made = torch_schedule(schedule, stages, self._config.microbatches)
        batch = (self._batch,) if placement[0] == self._rank else ()
        target = self._target if placement[-1] == self._rank else None
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        return _Contender(lambda: made.step(*batch, target=target), parameters)

    def _torch_calls(self, layers: int) -> dict[str, Seconds]:
        seconds = layers * self._config.layer_s(self._rank)

        def backward(*_: Any, full_backward: bool = True, **__: Any) -> float:
            return 2 * seconds if full_backward else seconds

        def one(*_: Any, **__: Any) -> float:
            return seconds

        return {
            "forward_one_chunk": one,
            "backward_one_chunk": backward,
            "backward_weight_one_chunk": one,
        }


def torch_placement(schedule: str, ranks: int) -> tuple[int, ...]:
    """Device of each of its stages."""
    return {
        "torch-1f1b": loop_placement(ranks),
        "torch-interleaved-zb": loop_placement(ranks, 2),
        "torch-zb-v": v_placement(ranks),
    }[schedule]


def torch_stages(
    layers: Sequence[nn.Module],
    sizes: Sequence[int],
    placement: Sequence[int],
    rank: int,
) -> list[Any]:
    """A rank's stages of torch."""
    stages = []
    for index in (i for i, device in enumerate(placement) if device == rank):
        begin = sum(sizes[:index])
        part = nn.Sequential(*layers[begin : begin + sizes[index]])
        stage: Any = PipelineStage(part, index, len(placement), torch.device("cpu"))
        # Torch 2.11 first sends something to every neighbour to make NCCL
        # connect. In a V a neighbour is the rank itself: gloo refuses that ("Pair
        # is not connected"), and it is connected anyway.
        stage._get_init_p2p_neighbors_ops = list
        stages.append(stage)
    return stages


def torch_schedule(schedule: str, stages: list[Any], microbatches: int) -> Any:
    """One of `TORCH_CONTENDERS` over a rank's stages."""
    if schedule == "torch-1f1b":
        return Schedule1F1B(stages[0], microbatches, F.mse_loss)
    if schedule == "torch-zb-v":
        return ScheduleZBVZeroBubble(stages, microbatches, F.mse_loss)
    return ScheduleInterleavedZeroBubble(stages, microbatches, F.mse_loss)


def main(path: str) -> None:
    """Runs the benchmark that the file describes; writes ``result-RANK.json``."""
    folder = Path(path).parent
    config = PipelineBenchConfig.from_json(Path(path).read_text())
    rank = read_placement().rank
    with (folder / f"stderr-{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    result = PipelineContenders(config, folder).run()
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
