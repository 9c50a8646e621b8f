"""Loops that fetch batches before the forward passes of earlier ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.runtime import run
from elche.session.process import current_run
from tests.distributed.cases.tasks import error_of, state_of
from tests.distributed.cases.user_loop_cases import FEATURES, Found
from tests.distributed.cases.user_loop_cases import POLICIES as USUAL
from tests.harness.settings import nested

POLICIES: dict[str, dict[str, Any]] = {
    **USUAL,
    "sync, sums": {"policy": "sync", "loss_reduction": "sum"},
    "sync, weighed": {"policy": "sync", "weight_of": lambda batch: weights(batch[2])},
}


def weights(index: torch.Tensor) -> float:
    """What a batch weighs where samples do not all weigh the same."""
    return float((index % 3).sum())


@dataclass(frozen=True)
class Look:
    """A loop, what it does with each batch, and under what policy."""

    loop: str
    body: str = "plain"
    policy: str = "sync"
    sizes: tuple[int, ...] = (16, 5, 31, 9, 20, 15, 2)


def _build(look: Look) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
    if look.body == "normalised":
        layers = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        net = elche.convert_sync_batchnorm(nn.Sequential(*layers))
    if look.body == "gan":
        net = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2)])
    if look.body == "chunks":
        net = nn.RNNCell(FEATURES // 2, 2)
    net.double()
    ends = list(itertools.accumulate(look.sizes))
    batches = [list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
    x = torch.randn(ends[-1], FEATURES, dtype=torch.float64)
    data = TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(ends[-1]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, DataLoader(data, batch_sampler=batches)


def alone(look: Look) -> dict[str, torch.Tensor]:
    """By plain PyTorch."""
    model, optimizer, loader = _build(look)
    _train(look, model, optimizer, loader)
    return dict(model.state_dict())


def on_ranks(looks: list[Look]) -> list[Found]:
    """On this rank of a run for each."""
    return [_on_rank(look) for look in looks]


def _on_rank(look: Look) -> Found:
    model, optimizer, loader = _begin(look)
    error = error_of(_train, look, model, optimizer, loader)
    return Found(error, state_of(model))


def _begin(look: Look) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    settings = nested({"timeout_s": 60.0, **POLICIES[look.policy]})
    return elche.setup(*_build(look), **settings)


def iterated_twice(policy: str) -> str:
    """How a loop over ``zip(loader, loader)`` ends on this rank of a run."""
    *_, loader = _begin(Look("plain", policy=policy))
    return error_of(lambda: list(zip(loader, loader, strict=False)))


def held_at_the_end(policy: str) -> list[str]:
    """The lines of a run that ends while an iterator is held, on this rank of it."""
    model, optimizer, loader = _begin(Look("plain", policy=policy))
    lines: list[str] = []
    present = current_run()
    assert present is not None
    present.notifications.emit = lines.append
    held = iter(loader)
    x, y, _ = next(held)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    elche.shutdown()
    return lines


def accumulated(policy: str) -> list[str]:
    """Warnings of a run whose last group waits for ``i + 1 == len(loader)``."""
    look = Look("plain", policy=policy, sizes=(16,) * 40)
    model, optimizer, loader = _begin(look)
    ends = len(loader) if policy == "sync" else -1  # which a window's rank passes over
    with mock.patch.object(run, "logger") as log:
        for number, (x, y, _) in enumerate(loader, 1):
            F.cross_entropy(model(x), y).backward()
            if number in (1, ends):
                optimizer.step()
                optimizer.zero_grad()
        elche.shutdown()
    return [call.args[0] % call.args[1:] for call in log.warning.call_args_list]


def _one_ahead(loader: Any) -> Iterator[list[Any]]:
    last = None
    for batch in loader:
        if last is not None:
            yield [last]
        last = batch
    yield [last]


def _groups(loader: Any, size: int) -> Iterator[list[Any]]:
    batches = iter(loader)
    while group := list(itertools.islice(batches, size)):
        yield group


LOOPS: dict[str, Callable[[Any], Iterator[list[Any]]]] = {
    "plain": lambda loader: ([batch] for batch in loader),
    "one ahead": _one_ahead,
    "two ahead": lambda loader: _one_ahead(batch for [batch] in _one_ahead(loader)),
    "groups of 3": lambda loader: _groups(loader, 3),
    "groups of 8": lambda loader: _groups(loader, 8),
    "listed": lambda loader: ([batch] for batch in list(loader)),
}
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "labels kept": lambda batch: [batch[0] * 1.0, *batch[1:]],
    "nothing kept": lambda batch: [each * 1 for each in batch],
}


def _train(
    look: Look, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    change = CONVERTED.get(look.body, list)  # as a wrapper of the user's does
    body, skipped = BODIES.get(look.body, _plain), PASSES.get(look.body, {})
    if look.body.startswith("peeked"):
        x, *_ = next(iter(loader))
        output = model(x)
        if look.body == "peeked, backward":
            output.sum().backward()
    for _ in range(2):
        for number, group in enumerate(LOOPS[look.loop](map(change, loader))):
            passes = skipped.get((elche.rank(), number), 1)
            for batch in group * passes:
                body(look, model, batch, 1.0 / len(group))
            optimizer.step()
            optimizer.zero_grad()


PASSES = {
    "everywhere": {(0, 2): 0, (1, 2): 0},
    "far apart": {(0, 0): 0, (1, 5): 0},
    "last ones": {(0, 5): 0, (1, 6): 0},
    "alone at the end": {(1, 6): 0},
    "uneven inside": {(0, 3): 2},
}
"""Passes of a batch that is skipped or run twice, by rank and its number."""


def _plain(look: Look, model: nn.Module, batch: Any, scale: float) -> None:
    x, y, index = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = losses.mean()
    if look.policy == "sync, sums":
        loss = losses.sum() / 16
    if look.policy == "sync, weighed":
        loss = (losses * (index % 3)).sum() / max(1.0, weights(index))
    (loss * scale).backward()


def _sharpness_aware(look: Look, model: nn.Module, batch: Any, scale: float) -> None:
    """SAM: two forward and backward passes of one batch."""
    _plain(look, model, batch, scale)
    held = [p for p in model.parameters() if p.grad is not None]
    moves = [0.05 * p.grad for p in held if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(held, moves)
    model.zero_grad()
    _plain(look, model, batch, scale)
    with torch.no_grad():
        torch._foreach_sub_(held, moves)


def _adversarial(look: Look, model: Any, batch: Any, scale: float) -> None:
    """A GAN's shape: the generator's input is not the loader's."""
    x, y, _ = batch
    maker, judge = model
    fake = maker(x.flip(1) * 0.5)
    (F.cross_entropy(judge(x), y) * scale).backward()
    (F.cross_entropy(judge(fake.detach()), 1 - y) * scale).backward()
    (F.cross_entropy(judge(fake), y) * scale).backward()


def _chunks(look: Look, model: nn.Module, batch: Any, scale: float) -> None:
    """Truncated backpropagation over two chunks of each sample."""
    x, y, _ = batch
    hidden = x.new_zeros(len(x), 2)
    for chunk in x.chunk(2, dim=1):
        hidden = model(chunk, hidden.detach())
        (F.cross_entropy(hidden, y) * scale).backward()


def _cut(look: Look, model: nn.Module, batch: Any, scale: float) -> None:
    """Views of a batch, by keyword, after a forward pass to look at."""
    x, y, index = batch
    with torch.no_grad():
        model(x * 2.0)
    for part in (0, 1):
        scores = model(input=x[:].view(-1, FEATURES))
        losses = F.cross_entropy(scores, y, reduction="none")
        ((losses * (index % 2 == part)).mean() * scale).backward()


BODIES: dict[str, Callable[[Look, Any, Any, float], None]] = {
    "sam": _sharpness_aware,
    "gan": _adversarial,
    "chunks": _chunks,
    "views": _cut,
}
