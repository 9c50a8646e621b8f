"""What a user may get wrong in a pipeline, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from elche.pipeline.pipeline import Pipeline
from tests.harness.logged import logged
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import CALM, WIDTH, loss_of, told

SAMPLES = 8


@dataclass
class Given:
    """What one rank passes; a mistake changes some of it."""

    layers: Any
    loss_fn: Any = loss_of
    options: dict[str, Any] = field(
        default_factory=lambda: {"micro_batches": 4, "schedule": "zb-h1"}
    )
    batch: Any = None
    target: Any = None
    call: str = "step"


def _layers(*widths: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in pairwise(widths)]


class Inside(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.body(x)


class Strange(nn.Module):
    """Returns a tensor of a kind that does not travel."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, torch.eye(2).to_sparse()


def _mistake_of_all(change: Callable[[Given], None]) -> Callable[[Given, int], None]:
    def apply(given: Given, rank: int) -> None:
        change(given)

    return apply


def _mistake_of_last(change: Callable[[Given], None]) -> Callable[[Given, int], None]:
    def apply(given: Given, rank: int) -> None:
        if rank == this_place().world_size - 1:
            change(given)

    return apply


def _options(**options: Any) -> Callable[[Given], None]:
    return lambda given: given.options.update(options)


def _set(**values: Any) -> Callable[[Given], None]:
    return lambda given: given.__dict__.update(values)


def _replaced(index: int, layer: Callable[[], Any]) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        given.layers[index] = layer()

    return change


MISTAKES: dict[str, Callable[[Given, int], None]] = {
    "other microbatches": _mistake_of_last(_options(micro_batches=8)),
    "one layer less": _mistake_of_last(lambda given: given.layers.pop(2)),
    "another layer": _mistake_of_last(_replaced(1, nn.ReLU)),
    "a layer without sizes, on one rank": _mistake_of_last(
        _replaced(2, lambda: lambda: nn.LazyLinear(WIDTH))
    ),
    "a loss that is a class": _mistake_of_all(_set(loss_fn=nn.CrossEntropyLoss)),
    "weights of nothing": _mistake_of_all(_options(weight_of=lambda target: -1)),
    "an option that is none, on one rank": _mistake_of_last(_options(microbatches=4)),
    "a batch of nothing": _mistake_of_all(_set(batch=torch.empty(0, WIDTH))),
    "a batch of text": _mistake_of_all(_set(batch="text")),
    "a batch of another width": _mistake_of_all(_set(batch=torch.ones(SAMPLES, 3))),
    "another call": _mistake_of_last(_set(call="evaluate")),
    "a loss without gradient": _mistake_of_all(
        _set(loss_fn=lambda y, t: loss_of(y, t).detach())
    ),
    "a loss that is complex": _mistake_of_all(
        _set(loss_fn=lambda y, t: loss_of(y, t) * 1j)
    ),
    "a loss that fails": _mistake_of_all(_set(loss_fn=lambda y: y)),
    "an input changed in place": _mistake_of_all(_replaced(2, Inside)),
    "a sparse output": _mistake_of_all(_replaced(1, Strange)),
}


def mistaken(kind: str) -> str:
    """What one of `MISTAKES` comes to on this rank; "" where all was well."""
    given = Given(
        layers=[*_layers(WIDTH, WIDTH), nn.Tanh(), *_layers(WIDTH, WIDTH, 3)],
        batch=torch.randn(SAMPLES, WIDTH),
        target=torch.arange(SAMPLES) % 3,
    )
    MISTAKES[kind](given, this_place().rank)

    def call() -> None:
        with Pipeline(given.layers, given.loss_fn, **given.options, **CALM) as pipe:
            getattr(pipe, given.call)(given.batch, given.target)

    return told(call)


def shuffled(kind: str) -> list[str]:
    """What this rank is warned of in three steps over a loader's batches."""
    place = this_place()
    torch.manual_seed(0 if kind == "alike" else place.rank)
    data = [(torch.full((WIDTH,), float(n)), n % 3) for n in range(24)]
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES, shuffle=True)  # type: ignore[arg-type, var-annotated]
    layers, options = _layers(WIDTH, WIDTH, 3), {"schedule": "1f1b", **CALM}
    with (
        logged("elche.pipeline") as warned,
        Pipeline(layers, loss_of, micro_batches=4, **options) as pipe,
    ):
        for x, y in loader:
            keeps_all = kind != "only what it reads"
            pipe.step(
                x if keeps_all or pipe.is_first else None,
                y if keeps_all or pipe.is_last else None,
            )
    return warned
