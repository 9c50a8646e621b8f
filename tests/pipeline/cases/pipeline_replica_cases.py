"""Replicas of pipelines in tests, and the same work in one process on all batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.pipeline import Pipeline
from elche.schedule.actions import Kind
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import (
    CALM,
    MODELS,
    WIDTH,
    Trouble,
    call,
    loss_of,
    told,
)

Groups = list[list[int]]
CLASSES = 3


class Gate(nn.Module):
    """Two experts; the second only sees samples that are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.always(x))
        chosen = x[:, 0] < 0
        if not bool(chosen.any()):
            return made
        return torch.where(chosen[:, None], made + self.rarely(x), made)


def _experts() -> list[nn.Module]:
    return [Gate(), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 3)]


@dataclass(frozen=True)
class Union:
    """What replicas train together.

    Attributes:
        sizes: by step, samples of each replica; 0 for one without a batch.
        own: options of each replica that differ between them.
        options: of all.
    """

    model: str = "mlp"
    sizes: tuple[tuple[int, ...], ...] = ((6, 5), (4, 0), (0, 7))
    own: tuple[dict[str, Any], ...] = ({"schedule": "1f1b"},) * 2
    replicas: int | Groups = 2
    micro_batches: int = 4
    loss_reduction: str = "mean"
    loss_scale: float = 1.0
    accumulated: int = 1
    clip: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one rank has afterwards."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    evaluated: float | None
    has_gradient: dict[str, bool]
    input_gradient: torch.Tensor | None
    replica: int = 0
    complete_s: Sequence[float] = ()
    last_action_s: tuple[float, float] = (0.0, 0.0)
    own_losses: Sequence[int] = ()


def layers_for(model: str) -> list[nn.Module]:
    made = _experts if model == "experts" else MODELS[model]
    torch.manual_seed(5)
    return [layer.double() for layer in made()]


def batch_of(work: Union, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The union of the replicas' batches, in their order."""
    generator = torch.Generator().manual_seed(step)
    count = sum(work.sizes[step])
    if work.model == "gpt":
        tokens = torch.randint(11, (count, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    if work.model == "experts" and step == 0:
        x = x.abs()
    return x, torch.randint(CLASSES, (count,), generator=generator)


def _summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def _loss_fn(work: Union) -> Any:
    return _summed if work.loss_reduction == "sum" else loss_of


def alone(work: Union) -> Outcome:
    """All batches in one process, plain autograd."""
    layers = layers_for(work.model)
    whole = nn.ModuleList(layers)
    optimizer = _optimizer(list(whole.parameters()))
    losses, norms = [], []
    x = torch.empty(0)
    for step in range(len(work.sizes)):
        optimizer.zero_grad()
        for _ in range(work.accumulated):
            x, y = batch_of(work, step)
            x.requires_grad_(x.is_floating_point())
            loss = _loss_fn(work)(call(layers, x, {}), y)
            loss.backward()
            losses.append(loss.item())
        learning = [p for p in whole.parameters() if p.requires_grad]
        norms.append(float(nn.utils.clip_grad_norm_(learning, work.clip)))
        optimizer.step()
    with torch.no_grad():
        x_last, y_last = batch_of(work, 0)
        evaluated = _loss_fn(work)(call(layers, x_last, {}), y_last).item()
    return Outcome(
        state=dict(whole.state_dict()),
        losses=losses,
        norms=norms,
        evaluated=evaluated,
        has_gradient={
            name: one.grad is not None
            for name, one in whole.named_parameters(remove_duplicate=False)
        },
        input_gradient=x.grad,
    )


def together(work: Union) -> Outcome:
    """This rank's part of the replicas' work."""
    rank, world_size = this_place().rank, this_place().world_size
    groups = _groups(work, world_size)
    replica = next(i for i, members in enumerate(groups) if rank in members)
    with Pipeline(
        layers_for(work.model),
        _loss_fn(work),
        **{"micro_batches": work.micro_batches, **work.own[replica]},
        replicas=work.replicas,
        loss_reduction=work.loss_reduction,
        **CALM,
        **work.options,
    ) as pipe:
        assert pipe.replica == replica
        assert pipe.num_replicas == len(groups)
        optimizer = _optimizer(list(pipe.parameters()))
        begin, complete_s = pipe._parts.executor.after_stage, list[float]()
        pipe._parts.executor.after_stage = lambda stage: (
            complete_s.append(time.monotonic()),
            begin(stage),
        )
        losses, norms, own, gradient = [], [], [], None
        for step in range(len(work.sizes)):
            pipe.zero_grad()
            for _ in range(work.accumulated):
                x, y = _part(work, step, pipe)
                out = pipe.step(x, y, input_gradients=True, loss_scale=work.loss_scale)
                losses.append(out.loss)
                own.append(len(out.losses))
                gradient = next(iter(out.input_gradients), None)
            assert pipe.unscale_(work.loss_scale)
            norms.append(pipe.clip_grad_norm_(work.clip))
            optimizer.step()
        has_gradient = {n: p.grad is not None for n, p in pipe.named_parameters()}
        last = [
            (begin_s, end_s)
            for one, begin_s, end_s in pipe.trace()
            if one.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
        ]
        return Outcome(
            replica=replica,
            complete_s=complete_s,
            last_action_s=last[-1] if last else (0.0, 0.0),
            evaluated=pipe.evaluate(*_part(work, 0, pipe)).loss,
            state=pipe.state_dict(),
            losses=losses,
            norms=norms,
            has_gradient=has_gradient,
            own_losses=own,
            input_gradient=gradient,
        )


def _groups(work: Union, world_size: int) -> Groups:
    if not isinstance(work.replicas, int):
        return work.replicas
    each = world_size // work.replicas
    return [list(range(i * each, (i + 1) * each)) for i in range(work.replicas)]


def _part(work: Union, step: int, pipe: Pipeline) -> tuple[Any, Any]:
    sizes = work.sizes[step]
    if not sizes[pipe.replica]:
        return None, None
    begin = sum(sizes[: pipe.replica])
    end = begin + sizes[pipe.replica]
    x, y = batch_of(work, step)
    return x[begin:end] if pipe.is_first else None, y[begin:end]


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Weight decay would move a parameter whose gradient is zero instead of None.
    # A rank may have nothing to train; SGD refuses an empty list.
    free = [*parameters, torch.zeros(1)]
    return torch.optim.SGD(free, lr=0.1, momentum=0.9, weight_decay=0.01)


def stumbles() -> list[str]:
    """The last rank of two replicas fails; what two steps came to."""
    is_last = this_place().rank == this_place().world_size - 1
    middle = Trouble("raises" if is_last else "")
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), middle, nn.Linear(WIDTH, CLASSES)]
    x, y = torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))
    options = {"micro_batches": 4, "schedule": "zb-h1", "replicas": 2}
    with Pipeline(layers, loss_of, **options, **CALM) as pipe:
        return [told(lambda: pipe.step(x, y)) for _ in range(2)]


def bad_batches() -> list[str]:
    """Of two replicas of one rank each; the last two are good."""
    rank = this_place().rank
    x, y = torch.randn(6, WIDTH), torch.randint(CLASSES, (6,))
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    layers[0].requires_grad_(False)
    batches: list[tuple[Any, Any]] = [
        (None, y) if rank else (x, y),
        (x[:3], y[:3]) if rank else (x, y),
    ]
    with Pipeline(layers, loss_of, micro_batches=4, replicas=2, **CALM) as pipe:
        found = [told(lambda b=b: pipe.step(*b)) for b in batches]
        found.append(told(lambda: pipe.evaluate(x, None if rank else y)))
        layers[0].requires_grad_(True)
        found.append(told(lambda: pipe.step(x, y)))
        layers[0].requires_grad_(False)
        found.append(told(lambda: pipe.step(x, y)))
        return found


def not_built(kind: str) -> str:
    """What the constructor says on this rank."""
    rank, world_size = this_place().rank, this_place().world_size
    other = rank >= world_size // 2
    options: dict[str, Any] = {"replicas": 2, "schedule": "1f1b"}
    width = WIDTH + 1 if kind == "other shape" and other else WIDTH
    layers: list[Any] = [
        nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, width),
        nn.Linear(width, CLASSES),
    ]
    if kind == "other settings" and other:
        options["loss_reduction"] = "sum"
    if kind == "other schedule" and rank == world_size - 1:
        options["schedule"] = "gpipe"
    return told(
        lambda: Pipeline(layers, loss_of, micro_batches=4, **CALM, **options).close()
    )


def begun() -> dict[str, torch.Tensor]:
    """The state of replicas whose ranks drew different parameters."""
    torch.manual_seed(this_place().rank)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)]
    layers[1].running_mean.normal_()
    own = {"partition": (1, 2)} if this_place().rank < 2 else {}
    with Pipeline(
        layers,
        loss_of,
        micro_batches=2,
        schedule="gpipe",
        replicas=[[0, 1], [2]],
        **CALM,
        stages_per_rank=None,
        **own,
    ) as pipe:
        return pipe.state_dict()


def normed() -> tuple[int, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """BatchNorm in replicas of which one has no second batch.

    Returns:
        The replica, its own buffers after training, and the whole state: gathered once,
        and again.
    """
    torch.manual_seed(2)
    layers = [
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)),
        nn.BatchNorm1d(CLASSES, affine=False),
    ]
    layers[0].register_buffer("mask", torch.tensor([float("-inf"), 0.1, float("nan")]))
    cuts = ({"partition": (1, 3)}, {})
    groups = [[0, 1], [2]]
    replica = int(this_place().rank == 2)
    with Pipeline(
        layers,
        loss_of,
        micro_batches=2,
        schedule="gpipe",
        replicas=groups,
        **CALM,
        **cuts[replica],
    ) as pipe:
        for step in range(2):
            x = torch.randn(6, WIDTH) + replica
            y = torch.randint(CLASSES, (6,))
            has_batch = replica == 0 or step == 0
            pipe.step(x if has_batch else None, y if has_batch else None)
        own = {name: one.clone() for name, one in pipe.local_state_dict().items()}
        states = [pipe.state_dict()]
        pipe.evaluate(x)
        states.append(pipe.state_dict())
        return replica, own, states
