"""Plain modules that elche cuts, and the same work in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import SplitPoint

from elche.pipeline.pipeline import Pipeline
from tests.pipeline.cases.pipeline_cases import CALM, Block, Trained, optimizer_for

WIDTH, VOCABULARY, LENGTH = 8, 11, 6


class Residual(nn.Module):
    """A block of a residual net."""

    def __init__(self, inside: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if inside != width:
            narrow = nn.Conv2d(inside, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(narrow, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += beside
        return self.relu(x)


class ResNet(nn.Module):
    """ResNet-18, with its names; narrow unless `width` is 64.

    Args:
        width: of the first layers.
        classes: of the output.
    """

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for index in range(1, 5):
            wide, stride = width << (index - 1), 1 if index == 1 else 2
            inside = wide // stride
            blocks = Residual(inside, wide, stride), Residual(wide, wide)
            self.add_module(f"layer{index}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(wide, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(1, 5):
            x = self.get_submodule(f"layer{index}")(x)
        x = self.avgpool(x)
        return self.fc(x.view(x.size(0), -1))


class Gpt(nn.Module):
    """A causal model with tied weights, and a mask as keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        if mask is not None:
            x = x * mask[:, :, None]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


class Crossing(nn.Module):
    """Values that live across several cuts, and parameters used between modules.

    One module runs twice, with a value in between that is changed in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        x = self.middle(self.middle(x) * self.scale + self.shift)
        for layer in self.up:
            x = layer(x + kept.pop())
            x += kept[0] if kept else self.shift
        return (x @ self.mix)[..., :3]


class Experts(nn.Module):
    """Each row goes to one of its experts; rows of a sum below `least` are left out."""

    def __init__(self, least: float | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += int(self.training)
        chosen, y = x[:, :3].argmax(-1), x.clone()
        for index, expert in enumerate(self.experts):
            if (mask := chosen == index).any():
                y[mask] = expert(x[mask])
        return y if self.least is None else y[x.sum(-1) > self.least]


class Routed(nn.Module):
    """A mixture of experts, with constants and `torch.no_grad` between its blocks."""

    def __init__(self, least: float | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Experts(least) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            with torch.no_grad():
                scale = x.mean(-1, keepdim=True).tanh()
            signs = torch.tensor([0.5, -0.5] * 4, device=x.device)
            x = block(x) + x * scale * signs
        return self.head(x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "gpt": Gpt,
    "crossing": Crossing,
    "routed": Routed,
}
POINTS: dict[str, Any] = {
    "resnet": ["layer2", "layer3.1", "layer4"],
    "gpt": {
        "blocks.1": SplitPoint.BEGINNING,
        "blocks.3": SplitPoint.BEGINNING,
        "blocks.5": SplitPoint.END,
    },
    "crossing": ["down.1", "middle", "up.1"],
}


@dataclass(frozen=True)
class Cut:
    """What to train.

    Attributes:
        model: one of `MODELS`.
        by_name: it is cut at `POINTS`; around its blocks otherwise.
        schedule: of the pipeline.
        sizes: of the batches, one a step.
        masked: the batch has a mask.
        on_meta: the model is given without values, and loads them.
        options: of the pipeline.
    """

    model: str = "gpt"
    by_name: bool = False
    schedule: str = "1f1b"
    sizes: tuple[int, ...] = (11, 3, 1)
    masked: bool = False
    on_meta: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def model_for(work: Cut) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[work.model]().double()


def data_for(work: Cut, step: int) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    count = work.sizes[step % len(work.sizes)]
    if work.model == "gpt":
        tokens = torch.randint(VOCABULARY, (count, LENGTH - step % 2 + 1))
        x: Any = tokens[:, :-1].contiguous()
        if work.masked:
            mask = torch.rand(x.shape, generator=generator, dtype=torch.float64) > 0.2
            x = {"tokens": x, "mask": mask.double()}
        return x, tokens[:, 1:].contiguous()
    y = torch.randint(3, (count,), generator=generator)
    shape = (count, 3, 64, 64) if work.model == "resnet" else (count, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64), y


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, dict):
        output = output["logits"]
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def parts_of(value: Any, count: int) -> list[Any]:
    """A batch in microbatches."""
    if isinstance(value, dict):
        parts = zip(*(parts_of(one, count) for one in value.values()), strict=True)
        return [dict(zip(value, part, strict=True)) for part in parts]
    return list(value.tensor_split(min(count, len(value))))


def alone(work: Cut, micro_batches: int) -> Trained:
    """In one process: microbatches one after the other, plain autograd."""
    model = model_for(work)
    optimizer = optimizer_for(list(model.parameters()))
    losses = []
    for step in range(len(work.sizes)):
        torch.manual_seed(step)
        x, y = data_for(work, step)
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(
            parts_of(x, micro_batches), parts_of(y, micro_batches), strict=True
        ):
            output = model(**part) if isinstance(part, dict) else model(part)
            loss = loss_of(output, target) * len(target) / len(y)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        torch.manual_seed(7)
        x, y = data_for(work, len(work.sizes) - 1)
        output = model(**x) if isinstance(x, dict) else model(x)
        evaluated = loss_of(output, y).item()
    return Trained(model.state_dict(), losses, evaluated=evaluated)


@dataclass
class Together:
    """What came out on one rank, and how many layers each stage has."""

    trained: Trained
    partition: tuple[int, ...]
    placement: tuple[int, ...]
    again: bool


def together(work: Cut, micro_batches: int) -> Together:
    """One rank of a pipeline of the model, cut by elche."""
    with torch.device("meta") if work.on_meta else nullcontext():
        model = model_for(work)
    torch.manual_seed(0)
    options = dict(work.options)
    sample, _ = data_for(Cut(model=work.model, sizes=(2,), masked=work.masked), 0)
    with Pipeline(
        model,
        loss_of,
        micro_batches=micro_batches,
        schedule=work.schedule,
        sample=sample,
        split_points=POINTS[work.model] if work.by_name else None,
        **CALM,
        **options,
    ) as pipe:
        if work.on_meta:
            pipe.load_state_dict(model_for(work).state_dict())
        optimizer = optimizer_for(list(pipe.parameters()))
        losses = []
        for step in range(len(work.sizes)):
            torch.manual_seed(step)
            x, y = data_for(work, step)
            pipe.zero_grad()
            losses.append(pipe.step(x, y).loss)
            optimizer.step()
        torch.manual_seed(7)
        x, y = data_for(work, len(work.sizes) - 1)
        out = pipe.evaluate(x, y, outputs="all")
        state = pipe.state_dict()
        model_for(work).load_state_dict(state)  # the names are the model's own
        pipe.load_state_dict(state)
        again = pipe.evaluate(x, y).loss == out.loss
        return Together(
            Trained(state, losses, evaluated=out.loss),
            pipe.partition,
            pipe.schedule.placement,
            again and out.outputs is not None,
        )
