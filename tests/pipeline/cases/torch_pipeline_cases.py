"""The same work under torch.distributed.pipelining and under elche, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn

from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    Work,
    call,
    data_for,
    layers_for,
    loss_of,
)

MICRO_BATCHES = 4
ELCHE_NAMES = {
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
}


@dataclass(frozen=True)
class Beside:
    """What both are to train: stages of two layers, four microbatches.

    Attributes:
        model: of `pipeline_cases.MODELS`.
        schedule: name of torch's class.
        replicas: how many pipelines run side by side, each on its part of the batch;
            torch's stages are then wrapped in DistributedDataParallel.
        samples: of each step's batch.
        compiled: whether the stages are compiled.
    """

    model: str
    schedule: str = "ScheduleInterleavedZeroBubble"
    replicas: int = 1
    samples: tuple[int, ...] = (12,)
    compiled: bool = False


@dataclass
class Outcome:
    """What one rank came to.

    Attributes:
        error: what was raised, "" if nothing.
        gradients: of this rank's parameters under the model's names, last step.
    """

    error: str = ""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def expected_gradients(asked: Beside) -> dict[str, torch.Tensor | None]:
    """Of the last step, in one process."""
    layers = nn.ModuleList(layers_for(Work(model=asked.model)))
    x, y = _data(asked, asked.samples[-1])
    loss_of(call(list(layers), x, {}), y).backward()
    return {name: one.grad for name, one in layers.named_parameters()}


def elche_step(asked: Beside) -> Outcome:
    """Runs the steps under elche on this rank."""
    outcome = Outcome()
    layers = layers_for(Work(model=asked.model))
    if asked.compiled:
        for layer in layers:
            layer.compile(backend="aot_eager")
    place = this_place()
    with Pipeline(
        layers,
        loss_of,
        micro_batches=MICRO_BATCHES,
        schedule=ELCHE_NAMES[asked.schedule],
        replicas=asked.replicas,
        **CALM,
    ) as pipe:
        for samples in asked.samples:
            pipe.zero_grad()
            replica = place.rank * asked.replicas // place.world_size
            pipe.step(*_part(asked, samples, replica))
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
    return outcome


def torch_step(asked: Beside, store: str) -> Outcome:
    """Runs the steps under torch on this rank.

    Args:
        asked: what to train.
        store: path of the file over which the ranks meet.
    """
    with _groups(asked.replicas, store) as (pipeline, replicas):
        stages = _stages(asked, pipeline)
        outcome = Outcome()
        try:
            _train(asked, stages, pipeline, replicas)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}: {error.__cause__}"
        for index, module in stages.items():
            for name, one in module.named_parameters():
                number, _, rest = name.partition(".")
                outcome.gradients[f"{2 * index + int(number)}.{rest}"] = one.grad
        return outcome


def _data(asked: Beside, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return data_for(Work(model=asked.model, samples=samples), 0)


def _part(
    asked: Beside, samples: int, replica: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one replica has of a batch."""
    begin, end = ((replica + edge) * samples // asked.replicas for edge in (0, 1))
    x, y = _data(asked, samples)
    return x[begin:end], y[begin:end]


@contextmanager
def _groups(replicas: int, store: str) -> Iterator[tuple[Any, Any]]:
    """This rank's pipeline, and the ranks with the same stages."""
    place = this_place()
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
    )
    try:
        length = place.world_size // replicas
        pipelines = [range(r * length, (r + 1) * length) for r in range(replicas)]
        columns = [range(s, place.world_size, length) for s in range(length)]
        made = [
            [distributed.new_group(list(ranks)) for ranks in cut]
            for cut in (pipelines, columns)
        ]
        yield made[0][place.rank // length], made[1][place.rank % length]
    finally:
        distributed.destroy_process_group()


def _stages(asked: Beside, pipeline: Any) -> dict[int, nn.Sequential]:
    """This rank's stages, by index."""
    layers = layers_for(Work(model=asked.model))
    ranks, rank = pipeline.size(), pipeline.rank()
    is_v = asked.schedule == "ScheduleZBVZeroBubble"
    held = (rank, 2 * ranks - 1 - rank if is_v else ranks + rank)
    each = len(layers) // (2 * ranks)
    assert each == 2
    return {index: nn.Sequential(*layers[2 * index : 2 * index + 2]) for index in held}


def _train(
    asked: Beside, stages: dict[int, nn.Sequential], pipeline: Any, replicas: Any
) -> None:
    # Loads much of torch that no other case needs.
    from torch.distributed.pipelining import PipelineStage, schedules

    count = 2 * pipeline.size()
    made = []
    for index, stage in stages.items():
        module: nn.Module = stage
        learns = any(one.requires_grad for one in stage.parameters())
        if asked.replicas > 1 and learns:
            module = nn.parallel.DistributedDataParallel(stage, process_group=replicas)
        if asked.compiled:
            module = torch.compile(stage, backend="aot_eager")  # type: ignore[assignment]
        cpu = torch.device("cpu")
        made.append(PipelineStage(module, index, count, cpu, group=pipeline))
    schedule = getattr(schedules, asked.schedule)(made, MICRO_BATCHES, loss_of)
    for samples in asked.samples:
        x, y = _part(asked, samples, replicas.rank())
        for stage in stages.values():
            stage.zero_grad()
        schedule.step(
            *((x,) if 0 in stages else ()),
            target=y if count - 1 in stages else None,
        )
