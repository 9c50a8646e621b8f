"""What averaging makes of unlike ranks, beside the same windows by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from tests.comm.plans import plan
from tests.comm.thread_group import on_ranks

Weights = Sequence[float]
Named = dict[str, torch.Tensor]
RANKS = 3
SHARING = pytest.mark.parametrize(
    "shares_host", [False, True], ids=["collectives", "shared"]
)
TOLERANCE = 1e-12


class Net(nn.Module):
    """Two dtypes of parameters, a statistic and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.narrow = nn.Parameter(torch.tensor([[4.0], [0.25]]))
        self.register_buffer("statistic", torch.zeros(2))
        self.register_buffer("counter", torch.tensor(0))


def train(model: Net, rank: int, number: int, steps: int = 1) -> None:
    """Steps that differ by rank and number; what they add is exact in float32."""
    with torch.no_grad():
        for step in range(steps):
            model.wide.add_((rank + 1) * 0.5 - 0.25 * (number + step))
            model.narrow.add_(0.125 * (rank - number) + 0.5 * step)
            model.statistic.add_(rank + 1.0)
            model.counter.add_(1)


def weighted_mean(values: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
    """Of what weighs anything."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total += value.double() * weight
    return total / sum(weights)


@dataclass
class ByHand:
    """Common parameters under an outer step, as its formulas have them."""

    outer: str = "average"
    lr: float = 1.0
    momentum: float = 0.5
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    velocity: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in Net().named_parameters():
            self.base[name] = value.detach().double()
            self.velocity[name] = torch.zeros_like(self.base[name])

    def divergence(self, own: dict[str, torch.Tensor], mean: Named) -> float:
        """Of a rank, once all of the base has moved."""
        apart = sum(float((own[n].double() - mean[n]).square().sum()) for n in mean)
        size = sum(float(base.square().sum()) for base in self.base.values())
        return math.sqrt(apart / size)

    def step(self, name: str, values: Sequence[torch.Tensor], weights: Weights) -> None:
        drift = self.base[name] - weighted_mean(values, weights)
        self.velocity[name] = self.momentum * self.velocity[name] + drift
        along = {
            "average": drift,
            "slowmo": self.velocity[name],
            "nesterov": drift + self.momentum * self.velocity[name],
        }[self.outer]
        self.base[name] = self.base[name] - self.lr * along
        if name != "wide":  # momentum of float32 is kept in bfloat16
            self.velocity[name] = self.velocity[name].bfloat16().double()

    def settings(self) -> dict[str, Any]:
        return {
            "outer": self.outer,
            "outer_lr": self.lr,
            "outer_momentum": self.momentum,
        }


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plan_for(rank: int, weights: Weights, window: int, **changes: Any) -> Any:
    """This rank's part of a reduction in which all buffers have changed."""
    given = {
        "window": window,
        "weight": weights[rank] / sum(weights),
        "active_ranks": sum(weight > 0 for weight in weights),
        "buffers": (0, 1),
    }
    return plan(rank=rank, **{**given, **changes})


def close(group: Any) -> None:
    """A plan comes when all ranks have closed the window, with the last one behind."""
    group.all_reduce(torch.zeros(1), "closing a window")


def check_equal(ranks: Sequence[dict[str, torch.Tensor]]) -> None:
    """All ranks hold the same bits."""
    for one in ranks[1:]:
        for name, value in one.items():
            assert torch.equal(value, ranks[0][name]), name


@pytest.mark.parametrize(
    "rule",
    [ByHand, lambda: ByHand("nesterov", 0.7, 0.5), lambda: ByHand("slowmo", 0.9, 0.3)],
    ids=["average", "nesterov", "slowmo"],
)
@pytest.mark.parametrize(
    "weights", [(1, 1, 1), (8, 3, 1), (2, 0, 5)], ids=["plain", "weighted", "one zero"]
)
@SHARING
def test_windows_end_at_the_weighted_mean(
    weights: Weights, rule: Any, shares_host: bool
) -> None:
    """A rank that weighs nothing has gone astray, to where no numbers are."""
    known: ByHand = rule()

    def run(group: Any, model: Net) -> list[tuple[Any, ...]]:
        averager = ParameterAverager(list(model.parameters()), model, list, group)
        averager.build()
        found = []
        for window in range(3):
            train(model, group.rank, window, steps=group.rank + 1)
            if not weights[group.rank]:
                with torch.no_grad():
                    model.wide[0], model.narrow[1] = torch.nan, torch.inf
            before = copied(model)
            close(group)
            reduction = plan_for(group.rank, weights, window, **known.settings())
            result = averager.reduce(reduction)
            found.append((before, copied(model), result.divergence))
        return found

    ranks = on_ranks(RANKS, run, [Net() for _ in range(RANKS)], shares_host=shares_host)
    counted = 0
    for window in range(3):
        sent = [found[window][0] for found in ranks]
        got = [found[window][1] for found in ranks]
        check_equal(got)
        for name, base in known.base.items():
            known.step(name, [each[name] for each in sent], weights)
            assert not torch.equal(known.base[name], base)
            value = got[0][name]
            near = TOLERANCE if value.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(
                value.double(), known.base[name], rtol=near, atol=near
            )
        means = {
            name: weighted_mean([each[name] for each in sent], weights)
            for name in known.base
        }
        for rank, weight in enumerate(weights):
            if weight:
                apart = known.divergence(sent[rank], means)
                assert ranks[rank][window][2] == pytest.approx(apart, rel=1e-5)
        # A statistic is what those have that count, each alike; a counter has it all.
        active = [float(weight > 0) for weight in weights]
        mean = weighted_mean([each["statistic"] for each in sent], active)
        torch.testing.assert_close(got[0]["statistic"].double(), mean)
        counted += sum(rank + 1 for rank, weight in enumerate(weights) if weight)
        assert got[0]["counter"].item() == counted


LAGS = [(0, 2, 1), (3, 0, 1), (0, 0, 0)]
"""Steps of each rank between its snapshot and the mean's coming; none at the end."""


@pytest.mark.parametrize(
    "rule", [ByHand, lambda: ByHand("nesterov", 0.7, 0.5)], ids=["average", "nesterov"]
)
@pytest.mark.parametrize(
    "weights", [(1, 1, 1), (8, 3, 1), (2, 0, 5)], ids=["plain", "weighted", "one zero"]
)
@SHARING
def test_a_late_mean_keeps_the_steps_that_were_taken_meanwhile(
    weights: Weights, rule: Any, shares_host: bool
) -> None:
    """Each rank's part of a mean is what it drifted from the last one that it took."""
    known: ByHand = rule()

    def run(group: Any, model: Net) -> list[tuple[Any, Any]]:
        averager = OverlappedAverager(list(model.parameters()), model, list, group)
        averager.build()
        found = []
        for window, lags in enumerate(LAGS):
            train(model, group.rank, window, steps=group.rank + 1)
            taken = copied(model)
            averager.snapshot(float(weights[group.rank]))
            lag = lags[group.rank]
            train(model, group.rank, window + 10, steps=lag // 2)
            reduction = plan_for(group.rank, weights, window, **known.settings())
            averager.begin(reduction)
            train(model, group.rank, window + 20, steps=lag - lag // 2)
            averager.poll()
            before = copied(model)
            averager.finish(reduction, is_drained=lags == (0, 0, 0))
            found.append((taken, before, copied(model)))
        return found

    ranks = on_ranks(RANKS, run, [Net() for _ in range(RANKS)], shares_host=shares_host)
    for window in range(len(LAGS)):
        taken = [found[window][0] for found in ranks]
        for name in known.base:
            known.step(name, [each[name] for each in taken], weights)
            near = TOLERANCE if name == "wide" else 1e-6
            for found in ranks:
                sent, before, got = (each[name].double() for each in found[window])
                expected = known.base[name] + (before - sent)
                torch.testing.assert_close(got, expected, rtol=near, atol=near)
    check_equal([found[-1][2] for found in ranks])


@pytest.mark.parametrize("kind", [ParameterAverager, OverlappedAverager])
def test_a_window_hands_the_model_to_the_transport_once(kind: Any) -> None:
    """And hardly anything else: a weight, and what has changed of the buffers."""
    layers = [nn.Linear(20, 20) for _ in range(30)]
    first = nn.Sequential(*layers, nn.BatchNorm1d(20))
    model_bytes = sum(each.nbytes for each in first.parameters())

    def run(group: Any, model: nn.Module) -> list[int]:
        averager = kind(list(model.parameters()), model, list, group)
        averager.build()
        found = []
        for window in range(3):
            model(torch.randn(8, 20)).mean()
            before, reduction = (
                group.reduced_bytes,
                plan_for(group.rank, (1, 1), window),
            )
            if kind is ParameterAverager:
                averager.reduce(reduction)
            else:
                averager.snapshot(0.5)
                averager.begin(reduction)
                averager.finish(reduction)
            found.append(group.reduced_bytes - before)
        return found

    for handed in on_ranks(2, run, [first, copy.deepcopy(first)]):
        assert all(model_bytes < each <= 1.1 * model_bytes for each in handed)
