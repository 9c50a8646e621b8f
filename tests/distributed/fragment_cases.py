"""A model synchronised in fragments: by ranks, and written out in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import elche
from elche import session
from elche.comm.averaging import ParameterAverager
from elche.comm.fragments import DriftSamples, fragments_of
from elche.comm.overlap import OverlappedAverager
from elche.comm.residual_exchange import ResidualExchange
from elche.runtime.parameter_sync import OverlappedSync
from tests.comm.plans import plan
from tests.distributed.cases import Task
from tests.distributed.cases import build as build_task
from tests.distributed.overlap_cases import all_changed, joined, local_step
from tests.harness.rank_main import this_place

LR, MOMENTUM = 0.7, 0.5


@dataclass(frozen=True)
class Turns:
    """What two ranks do: samples of each in every window, one step for each of them.

    Attributes:
        is_overlapped: a step of the next window comes before a mean is adopted.
    """

    is_overlapped: bool = False
    fragments: int = 3
    samples: tuple[tuple[int, int], ...] = ((3, 1), (2, 0), (0, 2), (3, 1), (2, 1))

    def steps(self, rank: int) -> Iterator[tuple[int, list[int], list[int]]]:
        """Of each window its number, its steps, and those before its mean comes."""
        begun = 0
        for window, counts in enumerate(self.samples):
            numbers = [10 * window + n for n in range(counts[rank])]
            ahead = self.samples[window + 1][rank] if self._lags(window) else 0
            early = [10 * (window + 1)] if ahead else []
            yield window, numbers[begun:], early
            begun = len(early)

    def fragment(self, window: int) -> int | None:
        is_last = window + 1 == len(self.samples)
        return None if is_last else window % self.fragments

    def _lags(self, window: int) -> bool:
        return self.is_overlapped and window + 1 < len(self.samples)


@dataclass
class Seen:
    """What a rank holds at the end, and the elements of each message it sent."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)


def build() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 4)]
    return nn.ModuleList(layers).double()


def train(turns: Turns) -> Seen:
    """The windows on this rank."""
    rank, model = this_place().rank, build()
    kind = OverlappedAverager if turns.is_overlapped else ParameterAverager
    drifts = DriftSamples("samples", turns.fragments)
    seen = Seen()
    with joined("shared") as group, joined("gloo", name="control") as control:
        averager = kind(
            list(model.parameters()),
            model,
            lambda: [torch.optim.SGD(model.parameters(), lr=0.1)],
            group,
            fragments=turns.fragments,
        )
        averager.build()
        for window, numbers, early in turns.steps(rank):
            for number in numbers:
                local_step(model, rank, number)
            counts = turns.samples[window]
            drifts.add(counts[rank])
            reduction = plan(
                rank,
                window=window,
                weight=counts[rank] / sum(counts),
                active_ranks=sum(count > 0 for count in counts),
                outer="nesterov",
                outer_lr=LR,
                outer_momentum=MOMENTUM,
                fragment=turns.fragment(window),
            )
            if isinstance(averager, ParameterAverager):
                all_changed(control, ())
                averager.synchronise(reduction, drifts.weights())
                drifts.synchronised(reduction.fragment)
                continue
            turn = window % turns.fragments
            averager.snapshot(
                drifts.weights()[turn], begins=counts[rank] > 0, fragment=turn
            )
            all_changed(control, ())
            averager.begin(reduction, drifts.weights())
            drifts.synchronised(reduction.fragment)
            for number in early:
                local_step(model, rank, number)
            averager.adopt(reduction, drained=not early)
        seen.sizes = [g.exchange.contribution(0).numel() for g in averager._groups]
    seen.state = {name: value.clone() for name, value in model.state_dict().items()}
    return seen


def reference(turns: Turns) -> list[dict[str, torch.Tensor]]:
    """Both ranks in one process, by the definition of the algorithm."""
    models = [build() for _ in range(2)]
    parts = [fragments_of(list(m.parameters()), turns.fragments) for m in models]
    bases = [[p.detach().clone() for p in some] for some in parts[0]]
    momenta = [[torch.zeros_like(p) for p in some] for some in bases]
    samples = [[0, 0] for _ in bases]
    by_rank = [list(turns.steps(rank)) for rank in range(2)]
    for window, counts in enumerate(turns.samples):
        for rank, model in enumerate(models):
            for number in by_rank[rank][window][1]:
                local_step(model, rank, number)
        for held in samples:
            held[0] += counts[0]
            held[1] += counts[1]
        turn = turns.fragment(window)
        drifts = [
            [
                [b - p.detach() for b, p in zip(base, some[f], strict=True)]
                for f, base in enumerate(bases)
            ]
            for some in parts
        ]
        for rank, model in enumerate(models):
            for number in by_rank[rank][window][2]:
                local_step(model, rank, number)
        for f in range(turns.fragments) if turn is None else [turn]:
            first, second = samples[f]
            for index, base in enumerate(bases[f]):
                mine, others = drifts[0][f][index], drifts[1][f][index]
                mean = (first * mine + second * others) / max(1, first + second)
                momenta[f][index] = MOMENTUM * momenta[f][index] + mean
                step = LR * (mean + MOMENTUM * momenta[f][index])
                with torch.no_grad():
                    for rank in range(2):
                        parts[rank][f][index].add_(drifts[rank][f][index] - step)
                bases[f][index] = base - step
            samples[f] = [0, 0]
    return [dict(model.state_dict()) for model in models]


def sent_per_window(task: Task) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Bytes that this rank sent in each window of a run with a codec."""
    model, optimizer, loader = build_task(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    run = session.current_run()
    assert run is not None
    sync = run._synchroniser.windows
    assert isinstance(sync, OverlappedSync)
    groups = sync._averager._groups
    counted, finish = [0], sync.finish

    def total() -> int:
        exchanges = [group.exchange for group in groups]
        coded = [each for each in exchanges if isinstance(each, ResidualExchange)]
        assert len(coded) == len(exchanges)
        return sum(each.sent_bytes for each in coded)

    def counting(reduction: object, *, is_drained: bool) -> object:
        result = finish(reduction, is_drained=is_drained)  # type: ignore[arg-type]
        counted.append(total())
        return result

    sync.finish = counting  # type: ignore[method-assign,assignment]
    for _ in range(task.epochs):
        for x, y, *_ in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    elche.shutdown()
    sent = [after - before for before, after in pairwise(counted)]
    return sent, state
