"""What a pipeline's step leaves to Python's collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elche.pipeline.pipeline import Pipeline
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    OPTIONS,
    Work,
    data_for,
    keywords_for,
    layers_for,
    loss_of,
)

References = dict[str, StorageWeakRef]
"""Of memory, which parts of a batch hold as well as the batch itself."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Only what nothing refers to is freed."""
    for _ in range(4):  # what an earlier test left may need more than one
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def tensors_in_cycles() -> int:
    """How many tensors only cycles hold."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.garbage)


def stepped(pipe: Pipeline, work: Work, step: int) -> References:
    """One step, of whose tensors nothing is kept."""
    x, y = data_for(work, step)
    x.requires_grad_(x.is_floating_point())
    words = keywords_for(work, len(x))
    out = pipe.step(x, y, input_gradients=x.requires_grad, **words)
    found = {"batch": x, "target": y, "losses": out.losses, **_tensors(words)}
    found |= {f"gradient {i}": g for i, g in enumerate(out.input_gradients)}
    return _references(found)


def evaluated(pipe: Pipeline, work: Work, step: int) -> References:
    """One evaluation, of whose tensors nothing is kept."""
    x, y = data_for(work, step)
    words = keywords_for(work, len(x))
    out = pipe.evaluate(x, y, **words)
    found = {"batch": x, "target": y, **_tensors(words)}
    if pipe.is_last:
        found["outputs"] = out.outputs
    return _references(found)


def _references(tensors: dict[str, torch.Tensor]) -> References:
    return {n: StorageWeakRef(one.untyped_storage()) for n, one in tensors.items()}


def _tensors(words: dict[str, Any]) -> dict[str, Any]:
    return {n: one for n, one in words.items() if isinstance(one, torch.Tensor)}


def left_over(work: Work) -> list[str]:
    """What lives on of a step's and an evaluation's tensors, and what cycles hold."""
    with Pipeline(
        layers_for(work),
        loss_of,
        micro_batches=work.micro_batches,
        schedule=work.schedule,
        **CALM,
        **OPTIONS.get(work.model, {}),
        **work.options,
    ) as pipe:
        optimizer = torch.optim.SGD(list(pipe.parameters()), 0.1)
        alive = []
        with without_collector():
            for step in range(work.steps):
                pipe.zero_grad()
                for name, one in stepped(pipe, work, step).items():
                    if not one.expired():
                        alive.append(f"step {step}: {name}")
                optimizer.step()
                for name, one in evaluated(pipe, work, step).items():
                    if not one.expired():
                        alive.append(f"evaluation {step}: {name}")
            in_cycles = tensors_in_cycles()
        return alive + [f"{in_cycles} tensors in cycles"] * bool(in_cycles)
