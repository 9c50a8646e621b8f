"""Pipelines whose layers move between ranks, and the same training in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    MODELS,
    WIDTH,
    Work,
    call,
    data_for,
    loss_of,
)

Counts = tuple[int, ...]
STEPS = 3
"""Trained on each partition; the third one is timed, on a rank without layers, too."""


@dataclass(frozen=True)
class MoveWork:
    """What to train, and how the layers move meanwhile.

    Attributes:
        partitions: layers of each place; `STEPS` are trained on each.
        placements: the rank of each place, None where it stays.
        built: from "modules", "meta" modules or "factories".
        registered: whether the optimizer is registered once, or given each time.
    """

    partitions: tuple[Counts, ...]
    model: str = "mlp"
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    placements: tuple[Counts | None, ...] = ()
    built: str = "modules"
    registered: bool = False

    @property
    def work(self) -> Work:
        return Work(model=self.model, schedule=self.schedule, micro_batches=4)


@dataclass
class Moved:
    """What came out of it on a rank.

    Attributes:
        state: of the whole model on rank 0.
        losses: of each step.
        placements: the rank of each stage, after each move.
        kept: whether layers that stayed are the same objects.
        holds: whether the optimizer held exactly this rank's parameters, all the time.
        steps: Adam's count for each parameter of this rank.
    """

    state: dict[str, torch.Tensor]
    losses: list[float]
    placements: list[Counts]
    kept: bool
    holds: bool
    steps: list[float]


def optimizer_of(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """Two groups, which may be empty."""
    listed = list(named)
    decayed: list[Any] = [(name, one) for name, one in listed if one.dim() > 1]
    others: list[Any] = [(name, one) for name, one in listed if one.dim() <= 1]
    if not decayed or not others or kind == "sgd":
        # torch takes no names where a group is empty.
        decayed, others = ([one for _, one in part] for part in (decayed, others))
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]
    if kind == "named":
        for group, name in zip(groups, ("decayed", "others"), strict=True):
            group["name"] = name
        # Another order on every other rank: names tell which is which.
        if this_place().rank % 2:
            groups.reverse()
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    # Where a gradient is zero but for rounding, a small eps makes steps of rounding.
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True, eps=1e-3)


def first_layers(model: str) -> list[nn.Module]:
    torch.manual_seed(5)
    return [layer.double() for layer in MODELS[model]()]


def trained_alone(given: MoveWork) -> tuple[dict[str, torch.Tensor], list[float]]:
    """In one process, with plain autograd."""
    whole = nn.ModuleList(first_layers(given.model))
    kind = "adamw" if given.optimizer == "named" else given.optimizer
    optimizer = optimizer_of(kind, whole.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(STEPS * len(given.partitions)):
        x, y = data_for(given.work, step)
        optimizer.zero_grad()
        total, begin = 0.0, 0
        for part in x.tensor_split(given.work.micro_batches):
            end = begin + len(part)
            loss = loss_of(call(list(whole), part, {}), y[begin:end])
            loss = loss * len(part) / len(x)
            loss.backward()
            total, begin = total + loss.item(), end
        losses.append(total)
        optimizer.step()
        scheduler.step()
    return dict(whole.state_dict()), losses


def _given_layers(given: MoveWork) -> list[Any]:
    if given.built == "meta":
        with torch.device("meta"):
            return first_layers(given.model)
    if given.built == "factories":
        count = len(first_layers(given.model))
        return [lambda i=i: first_layers(given.model)[i] for i in range(count)]
    return first_layers(given.model)


def moved(given: MoveWork) -> Moved:
    """The work of one rank."""
    placements: list[Counts] = []
    losses, kept, holds = [], True, True
    with Pipeline(
        _given_layers(given),
        loss_of,
        micro_batches=given.work.micro_batches,
        schedule=given.schedule,
        partition=given.partitions[0],
        init=(lambda layer: None) if given.built == "meta" else None,
        **CALM,
    ) as pipe:
        if given.built == "meta":
            pipe.load_state_dict(nn.ModuleList(first_layers(given.model)).state_dict())
        optimizer = optimizer_of(given.optimizer, pipe.named_parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if given.registered:
            pipe.register_optimizer(optimizer)
        for index, counts in enumerate(given.partitions):
            if index:
                before = dict(pipe.named_parameters())
                placement = given.placements[index] if given.placements else None
                pipe.repartition(
                    counts,
                    placement=placement,
                    optimizer=None if given.registered else optimizer,
                )
                after = dict(pipe.named_parameters())
                kept = kept and all(after[n] is before[n] for n in after if n in before)
                placements.append(pipe.schedule.placement)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            holds = holds and held == {id(p) for p in pipe.parameters()}
            for step in range(STEPS * index, STEPS * (index + 1)):
                x, y = data_for(given.work, step)
                pipe.zero_grad()
                out = pipe.step(
                    x if pipe.is_first else None, y if pipe.is_last else None
                )
                losses.append(out.loss)
                optimizer.step()
                scheduler.step()
        steps = [float(one.get("step", 0)) for one in optimizer.state.values()]
        return Moved(pipe.state_dict(0), losses, placements, kept, holds, steps)


def accumulated() -> list[float]:
    """Layers move between two halves of a batch; the gradient is that of the whole."""
    x, y = data_for(Work(), 0)
    layers = first_layers("mlp")
    found = []
    with Pipeline(layers, loss_of, micro_batches=4, schedule="1f1b", **CALM) as pipe:
        pipe.step(x, y)
        pipe.repartition((1, 7), optimizer=())
        pipe.step(x, y)
        twin = nn.ModuleList(first_layers("mlp"))
        (2 * loss_of(call(list(twin), x, {}), y)).backward()
        expected = {name: one.grad for name, one in twin.named_parameters()}
        for name, one in pipe.named_parameters():
            assert one.grad is not None
            assert expected[name] is not None
            away = (one.grad - expected[name]).norm() / expected[name].norm()
            found.append(float(away))
    return found


def moved_replicas() -> tuple[list[int], bool]:
    """Two pipelines of two ranks train together; each moves layers as it likes.

    Returns:
        Layers of this rank in the end, and parameters with state in its optimizer;
        and whether losses and parameters are those of one process.
    """
    rank = this_place().rank
    mine = slice(None, 6) if rank < 2 else slice(6, None)
    partitions: list[Counts] = [(4, 4), (6, 2), (4, 4)]
    if rank >= 2:
        partitions = [(4, 4), (3, 5), (8, 0)]
    whole = nn.ModuleList(first_layers("mlp"))
    alone = optimizer_of("sgd", whole.named_parameters())
    agrees = True
    with Pipeline(
        first_layers("mlp"),
        loss_of,
        micro_batches=2,
        schedule="1f1b",
        replicas=2,
        **CALM,
    ) as pipe:
        optimizer = optimizer_of("sgd", pipe.named_parameters())
        for step, counts in enumerate(partitions):
            if step:
                pipe.repartition(counts, optimizer=optimizer)
            x, y = data_for(Work(samples=12), 0)
            pipe.zero_grad()
            found = pipe.step(x[mine], y[mine]).loss
            optimizer.step()
            alone.zero_grad()
            loss = loss_of(call(list(whole), x, {}), y)
            loss.backward()
            alone.step()
            agrees = agrees and abs(found - loss.item()) <= 1e-12 * loss.item()
        expected = dict(whole.state_dict())
        for name, one in pipe.local_state_dict().items():
            away = (one - expected[name]).norm() / expected[name].norm()
            agrees = agrees and float(away) <= 1e-12
        return [len(pipe.layers), len(optimizer.state)], agrees


class Ways(nn.Module):
    """Made otherwise on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=this_place().rank == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def nowhere_but_on_rank_0() -> nn.Module:
    if this_place().rank:
        raise ValueError("no such layer here")
    return nn.Linear(WIDTH, WIDTH)


def refused(kind: str) -> list[str]:
    """What a repartition that cannot be came to, and a step after it."""
    place = this_place()
    is_last = place.rank == place.world_size - 1
    torch.manual_seed(2)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if kind == "other factory":
        layers = [Ways, *layers[1:]]
    if kind == "raising factory":
        layers = [nowhere_but_on_rank_0, *layers[1:]]
    x, y = torch.randn(8, WIDTH), torch.randint(3, (8,))
    found: list[str] = []
    with Pipeline(layers, loss_of, micro_batches=4, schedule="1f1b", **CALM) as pipe:
        optimizer: Any = torch.optim.AdamW(pipe.parameters())
        pipe.step(x, y)
        optimizer.step()
        partition: Any = (1, 3) if place.world_size == 2 else (0, 2, 1, 1)
        options: dict[str, Any] = {}
        if kind == "wrong sum":
            partition = (2, 3)
        if kind == "negative":
            partition = (5, -1)
        if kind == "other counts" and is_last:
            partition = (3, 1)
        if kind == "unknown rank":
            options["placement"] = (0, 2)
        if kind == "no optimizer":
            optimizer = None
        if kind == "no torch optimizer" and is_last:
            optimizer = object()
        if kind == "stranger's optimizer" and is_last:
            optimizer = torch.optim.AdamW([torch.zeros(1)])
        if kind == "other class" and is_last:
            optimizer = torch.optim.SGD(pipe.parameters())
        if kind == "other groups" and is_last:
            optimizer.add_param_group({"params": [torch.zeros(1)]})
        if kind == "other settings" and is_last:
            optimizer.param_groups[0]["lr"] = 0.5
        if kind == "odd state" and place.rank == 0:
            optimizer.state[list(pipe.parameters())[-1]]["odd"] = object()
        if kind in ("other factory", "raising factory"):
            partition = (0, 4)
        try:
            if kind == "other call" and is_last:
                pipe.step(x, y)
            else:
                pipe.repartition(partition, optimizer=optimizer, **options)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        before = [id(one) for one in pipe.parameters()]
        found.append(f"{list(pipe.partition)} {len(before)} {pipe.step(x, y).loss > 0}")
    return found
