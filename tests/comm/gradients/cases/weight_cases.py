"""Padded sequences, whose loss is a mean over tokens, on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elche
from elche.session.process import failing_together
from tests.harness.settings import nested

IGNORED = -100
LENGTH, WORDS = 12, 16
State = dict[str, torch.Tensor]


class Padded(Dataset[Any]):
    """Sequences of 1 to 12 tokens; every seventh, and those from 8 to 11, of `least`.

    All are of 12 where nothing is padded.
    """

    def __init__(self, samples: int, *, is_padded: bool = True, least: int = 0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(WORDS, (samples, LENGTH), generator=generator)
        for index in range(samples):
            tokens = int(torch.randint(1, LENGTH + 1, (), generator=generator))
            if index % 7 == 6 or index in range(8, 12):
                tokens = least
            tokens = tokens if is_padded else LENGTH
            self.labels[index, tokens:] = IGNORED

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        return self.words[index], self.labels[index]


def tokens_of(batch: Any) -> torch.Tensor:
    """What a batch weighs."""
    return (batch[1] != IGNORED).sum()


def network(kind: str = "plain") -> nn.Sequential:
    """The same at every call."""
    torch.manual_seed(3)
    norm = [nn.BatchNorm1d(LENGTH)] if kind == "norm" else []
    layers = [nn.Embedding(WORDS, 8), *norm, nn.Tanh(), nn.Linear(8, WORDS)]
    return nn.Sequential(*layers).double()


def token_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss summed over tokens."""
    words, labels = batch[0], batch[1]
    logits = model(words).flatten(0, 1)
    return F.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def masked_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """Its mean, as scripts write it: no number, nor its gradient, of padding alone."""
    words, labels = batch[0], batch[1].flatten()
    logits = model(words).flatten(0, 1)
    each = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    mask = labels != IGNORED
    return (each * mask).sum() / mask.sum()


def masked_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum, with the same fault."""
    return masked_mean(model, batch) * tokens_of(batch)


LOSSES: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
    "mean": masked_mean,
    "sum": masked_sum,
}


@dataclass(frozen=True)
class Job:
    """What to train, how its loss is reduced, backward passes per optimizer step.

    Batches that are not padded weigh their samples.
    """

    samples: int = 100
    batch_size: int = 16
    epochs: int = 1
    loss: str = "mean"
    passes: int = 1
    model: str = "plain"
    shuffle: bool = True
    is_padded: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ended:
    """What a process holds at the end.

    Attributes:
        state: of the model.
        logged: mean over the last epoch of what was logged, and its metrics' samples.
        samples: of all ranks.
    """

    state: State
    logged: float = 0.0
    samples: int = 0


def on_ranks(job: Job) -> Ended:
    """The job on this rank of a run."""
    model, optimizer, loader = _build(job)
    if job.model == "norm":
        model = elche.convert_sync_batchnorm(model)
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        loader,
        weight_of=tokens_of if job.is_padded else None,
        loss_reduction=job.loss,
        **nested(job.options),
    )
    for _ in range(job.epochs):
        for number, batch in enumerate(loader):
            LOSSES[job.loss](model, batch).backward()
            # What a user asks for beside the step is not reduced, and not scaled.
            weight = model[0].weight
            (penalty,) = torch.autograd.grad(weight.square().sum(), [weight])
            assert torch.equal(penalty, 2 * weight)
            elche.log_scalar("label", _mean_label(batch))
            if number % job.passes == job.passes - 1:
                optimizer.step()
                optimizer.zero_grad()
    metrics = elche.epoch_metrics()
    ended = Ended(_copied(model), metrics.scalars["label"], metrics.samples)
    elche.shutdown()
    return ended


def alone(job: Job, *, steps_on_padding: bool = True) -> Ended:
    """The job in this process, by plain PyTorch alone; padding has no gradient."""
    model, optimizer, loader = _build(job)
    labels = tokens = samples = 0.0
    for epoch in range(job.epochs):
        for number, batch in enumerate(loader):
            loss = token_sum(model, batch)
            weight = float(tokens_of(batch))
            (loss if job.loss == "sum" else loss / max(1.0, weight)).backward()
            if epoch == job.epochs - 1:
                samples += len(batch[0])
                labels, tokens = _logged(batch, labels, tokens)
            if number % job.passes == job.passes - 1 and (weight or steps_on_padding):
                optimizer.step()
                optimizer.zero_grad()
    return Ended(_copied(model), labels / tokens, int(samples))


def _build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network(job.model)
    rate = 0.5 if job.loss == "mean" else 0.5 / 100
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    order = torch.Generator().manual_seed(11)
    # A share of padding alone would add nothing to BatchNorm's statistics.
    least = 1 if job.model == "norm" else 0
    data = Padded(job.samples, is_padded=job.is_padded, least=least)
    size = job.batch_size
    loader = DataLoader(data, size, shuffle=job.shuffle, generator=order)
    return model, optimizer, loader


def _mean_label(batch: Any) -> torch.Tensor:
    return batch[1][batch[1] != IGNORED].double().mean()


def _logged(batch: Any, labels: float, tokens: float) -> tuple[float, float]:
    held = batch[1][batch[1] != IGNORED]
    return labels + float(held.sum()), tokens + len(held)


def _copied(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def weigh_by(options: dict[str, Any]) -> None:
    """An epoch in which rank 1 weighs a batch by what no batch can weigh."""
    model, optimizer, loader = _build(Job())
    seen = 0

    def weight_of(batch: Any) -> Any:
        nonlocal seen
        seen += 1
        return -1 if elche.rank() == 1 and seen == 2 else len(batch[0])

    model, optimizer, loader = elche.setup(
        model, optimizer, loader, weight_of=weight_of, **nested(options)
    )
    with failing_together():
        for batch in loader:
            masked_mean(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
