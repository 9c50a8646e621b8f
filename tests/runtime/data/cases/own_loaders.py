"""Loaders with an iteration of their own, as people write them."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ElcheError
from elche.session.process import current_run, failing_together
from tests.distributed.cases.tasks import take_step

SAMPLES, SIZE, EPOCHS, MEAN = 52, 8, 3, 3.0


class Normalising(DataLoader[Any]):
    """Takes other arguments, and counts its epochs."""

    def __init__(self, data: Any, *, mean: float, **options: Any) -> None:
        super().__init__(data, **options)
        self.mean, self.epoch, self.ended = mean, 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.epoch += 1
        for x, y, number in super().__iter__():
            yield (x - self.mean) * (1.0 + self.epoch / 10), y, number
        self.ended += 1


class Filtering(DataLoader[Any]):
    def _get_iterator(self) -> Any:  # an iterator around another, as PyG's
        batches = super()._get_iterator()
        return (((x - MEAN) * 2, y, number) for x, y, number in batches)


class Repeated:
    """A batch sampler without an end, and without a length."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Infinite(DataLoader[Any]):
    """Keeps its iterator, as ultralytics' and timm's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


def background(batches: Any) -> Iterator[Any]:
    """As prefetch_generator's."""
    loaded: queue.Queue[Any] = queue.Queue(1)

    def load() -> None:
        try:
            for batch in batches:
                loaded.put(batch)
        finally:
            loaded.put(None)

    threading.Thread(target=load, daemon=True).start()
    yield from iter(loaded.get, None)


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """One batch is fetched before the last is yielded."""
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last


OWN: dict[str, Callable[[Iterator[Any]], Any]] = {
    "ahead": ahead,
    "dropping": lambda batches: itertools.islice(batches, 1, None),
    "splitting": lambda batches: (b for x in batches for b in (x, x)),
    "short": lambda batches: itertools.islice(batches, 2),
    "in a thread": background,
}


class Iterating(DataLoader[Any]):
    """Does something of its own with its batches."""

    def __init__(self, *args: Any, own: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own = own

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(OWN[self.own](super().__iter__()))


class Endless(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x + MEAN, (x[:, 0] > 0).long(), torch.arange(SAMPLES))


def made(kind: str, workers: int = 0) -> Any:
    """A loader by its kind."""
    options: dict[str, Any] = {"batch_size": SIZE, "num_workers": workers}
    if kind == "normalising":
        options["persistent_workers"] = workers > 0
        return Normalising(data(), mean=MEAN, shuffle=True, **options)
    if kind == "endless":
        return DataLoader(data(), sampler=Endless(), **options)
    if kind in OWN:
        return Iterating(data(), own=kind, **options)
    return {"plain": DataLoader, "filtering": Filtering, "infinite": Infinite}[kind](
        data(), **options
    )


@dataclass
class Found:
    """What a process holds at the end, or why it ended."""

    error: str = ""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    seen: list[list[int]] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def _parts(norm: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] * norm), nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _train(model: Any, optimizer: Any, batches: Any, found: Found) -> None:
    """One epoch."""
    found.seen.append([])
    found.sums.append(0.0)
    for x, y, number in batches:
        take_step(model, optimizer, x, y)
        run = current_run()
        if run is None or run.current_samples:
            found.seen[-1] += number.tolist()
            found.sums[-1] += float(x.sum())


def _ended(model: nn.Module, loader: Any, found: Found) -> Found:
    state = model.state_dict()
    found.state = {name: each.detach().clone() for name, each in state.items()}
    found.counts = [getattr(loader, name, 0) for name in ("epoch", "ended")]
    return found


def alone(kind: str, workers: int = 0) -> Found:
    """By plain PyTorch; of an endless sampler ``len()`` batches."""
    (model, optimizer), loader, found = _parts(), made(kind, workers), Found()
    for _ in range(EPOCHS):
        batches = itertools.islice(loader, len(loader))
        _train(model, optimizer, loader if kind != "endless" else batches, found)
    return _ended(model, loader, found)


def on_ranks(kind: str, policy: str, workers: int = 0, loop: str = "") -> Found:
    """On this rank of a run, or on one device that draws by position."""
    (model, optimizer), loader, found = _parts(loop != ""), made(kind, workers), Found()
    try:
        with failing_together():
            model, optimizer, ours = elche.setup(
                model, optimizer, loader, policy=policy, epochs=EPOCHS
            )
            for _ in elche.epochs(EPOCHS):
                in_thread = loop == "in a thread"
                _train(model, optimizer, background(ours) if in_thread else ours, found)
                if loop == "evaluated":
                    model.eval()
                    with torch.no_grad():
                        found.sums[-1] += float(sum(model(x).sum() for x, *_ in ours))
                    model.train()
                if loop.startswith("update_bn"):
                    update_bn(loader if "plain" in loop else ours, AveragedModel(model))
                    break
    except ElcheError as raised:
        found.error = str(raised)
    elche.shutdown()
    return _ended(model, loader, found)
