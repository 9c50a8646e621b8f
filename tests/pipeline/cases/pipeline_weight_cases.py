"""Means over targets that are not ignored, in a pipeline and in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.pipeline import Pipeline
from tests.harness.logged import logged
from tests.pipeline.cases.pipeline_cases import CALM, furthest

WORDS, WIDTH, LENGTH, SAMPLES, IGNORED = 11, 6, 5, 8, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)).cumsum(1) / LENGTH


class Causal(nn.Module):
    """Computes its own loss over shifted labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, found = self.head(x), {}
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, WORDS), shifted.view(-1))
            found = {"loss": loss}
        return {**found, "logits": logits}


def masked_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Without targets 0 / 0, and so are its gradients."""
    places = target.clamp(min=0)[..., None]
    rows = -logits.log_softmax(-1).gather(-1, places)[..., 0]
    there = target != IGNORED
    return (rows * there).sum() / there.sum()


def count(target: torch.Tensor) -> torch.Tensor:
    return (target != IGNORED).sum()


@dataclass(frozen=True)
class Means:
    """How means are computed, and in which pipeline.

    Attributes:
        way: "model's" loss of labels in the batch, or "weighed" by `weight_of`.
        schedule: of the pipeline.
        replicas: of the pipeline.
    """

    way: str
    schedule: str = "1f1b"
    replicas: int = 1


def model() -> Causal:
    torch.manual_seed(1)
    return Causal().double()


def data(step: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, of half of the sequences padded; one has none at all."""
    drawn = torch.Generator().manual_seed(10 * step + replica)
    tokens = torch.randint(WORDS, (SAMPLES - step, LENGTH), generator=drawn)
    labels = tokens.clone()
    labels[::2, 2:] = IGNORED
    labels[1] = IGNORED
    return tokens, labels


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def alone(replicas: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process over two accumulated batches of all."""
    made = model()
    drawn = [data(step, r) for step in (0, 1) for r in range(replicas)]
    total = sum(count(shifted(labels)) for _, labels in drawn)
    loss = sum(
        F.cross_entropy(
            made(tokens)["logits"].flatten(0, 1),
            shifted(labels).flatten(),
            reduction="sum",
        )
        / total
        for tokens, labels in drawn
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    named = made.named_parameters()
    return loss.item(), {n: p.grad for n, p in named if p.grad is not None}


def piped(work: Means) -> tuple[float, float, list[str]]:
    """Furthest gradient and loss from one process's on this rank, and warnings."""
    loss, expected = alone(work.replicas)
    made, tokens = model(), data(1)[0]
    is_own = work.way == "model's"
    options: dict[str, Any] = {"sample": {"input_ids": tokens, "labels": tokens}}
    if not is_own:
        layers = [made.embed, *made.blocks, made.head]
        options = {"split": lambda _: layers, "weight_of": count}
    with (
        logged("elche.pipeline") as warned,
        Pipeline(
            made,
            None if is_own else masked_mean,
            micro_batches=8,
            schedule=work.schedule,
            replicas=work.replicas,
            **options,
            **CALM,
        ) as pipe,
    ):
        pairs = range(work.replicas)
        weights = [
            sum(int(count(shifted(data(step, r)[1]))) for r in pairs) for step in (0, 1)
        ]
        found = 0.0
        for step, weight in enumerate(weights):
            x, y = data(step, pipe.replica)
            given = ({"input_ids": x, "labels": y},) if is_own else (x, shifted(y))
            share = weight / sum(weights)
            took = pipe.step(*given, loss_scale=share, outputs="all")
            assert pipe.evaluate(*given).loss == took.loss
            logits = took.outputs["logits"] if is_own else took.outputs
            wanted = model()(x)["logits"]
            assert torch.allclose(logits, wanted, rtol=0, atol=1e-9) or step == 1
            found += took.loss * share
        mine = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        wanted = {name: expected[name] for name in mine}
        far = furthest(mine, wanted)
    return far, abs(found - loss) / loss, warned


class Masked(nn.Module):
    """Adds the mask to scores between positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.transpose(1, 2) + mask).softmax(-1)
        return x + self.linear(weights @ x)


class TwoMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Masked(), Masked(), nn.Linear(WIDTH, 3)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x, mask)
        return self.blocks[2](x)


class Scaled(nn.Module):
    """Scales each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * scale)[:, None]


def last_loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y[:, -1], t)


def square_masks(how: str) -> list[float | str]:
    """Losses of steps with a mask between positions, less those of one process."""
    torch.manual_seed(2)
    made = TwoMasked().double()
    options: dict[str, Any] = {"split": lambda one: list(one.blocks)}
    if how == "traced":
        sample = {"x": torch.ones(3, 3, WIDTH).double(), "mask": torch.eye(3).double()}
        options = {"sample": sample}
    elif how == "whole":
        options["whole"] = ("mask",)
    found: list[float | str] = []
    sizes = ((SAMPLES, SAMPLES), (SAMPLES, 3), (3, SAMPLES), (3, 3))
    with Pipeline(made, last_loss, micro_batches=8, **options, **CALM) as pipe:
        for samples, length in sizes if how != "learned" else sizes[1:]:
            x = torch.randn(samples, length, WIDTH).double()
            mask, y = torch.randn(length, length).double(), torch.arange(samples) % 3
            expected = last_loss(made(x, mask), y).item()
            try:
                if how == "traced":
                    loss = pipe.step({"x": x, "mask": mask}, y).loss
                else:
                    loss = pipe.step(x, y, mask=mask).loss
                found.append(abs(loss - expected))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def split_calls() -> list[str]:
    """Errors of calls that give the batch of two replicas, or losses and gradients."""
    torch.manual_seed(2)
    made = [Scaled()]
    x, y, scale = torch.randn(8, WIDTH), torch.arange(8) % 3, torch.randn(8, 1)
    last_loss(made[0](x, scale), y).backward()
    expected = made[0].linear.weight.grad
    made[0].linear.weight.grad = None
    options: dict[str, Any] = {"replicas": 2, "split_batches": True, **CALM}
    found = []
    with (
        logged("elche.pipeline") as warned,
        Pipeline(made, last_loss, micro_batches=2, **options) as pipe,
    ):
        given = x if pipe.rank == 0 else None
        for batch, target, words in (
            (x, y[:4], scale),
            (given, y, scale),
            (x.numpy(), y.numpy(), scale.numpy()),
        ):
            try:
                pipe.step(batch, target, scale=words)
            except Exception as error:
                found.append(str(error))
        assert torch.allclose(next(pipe.parameters()).grad, expected, atol=1e-6)
        assert warned == []
        pipe.step(x + pipe.rank, y, scale=scale)
    return found + warned
