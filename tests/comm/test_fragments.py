"""Fragments: how parameters are divided, what each weighs, and whose turn it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.averaging import ParameterAverager
from elche.comm.fragments import DriftSamples, fragments_of
from elche.comm.overlap import OverlappedAverager
from elche.errors import ConfigError, ProtocolError
from tests.comm.bus import Bus
from tests.comm.plans import plan


def parameters_of(sizes: list[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_fragments_are_consecutive_and_the_largest_is_the_least(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parameters = parameters_of(sizes)
    found = fragments_of(parameters, count)
    assert len(found) == count
    assert all(found)
    assert [id(p) for some in found for p in some] == [id(p) for p in parameters]
    largest = max(sum(p.numel() for p in some) for some in found)
    assert largest == least_largest(sizes, count)


def least_largest(sizes: list[int], count: int) -> int:
    """By trying all ways to cut."""
    if count == 1:
        return sum(sizes)
    return min(
        max(sum(sizes[:first]), least_largest(sizes[first:], count - 1))
        for first in range(1, len(sizes) - count + 2)
    )


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"per trained parameter \(2\), got fragm"):
        fragments_of(parameters_of([3, 4]), 3)


def test_a_drift_weighs_what_was_trained_since_its_turn() -> None:
    drifts = DriftSamples("samples", 3)
    drifts.add(4)
    assert drifts.weights() == (4.0, 4.0, 4.0)
    drifts.synchronised(0)
    drifts.add(0)
    assert drifts.weights() == (0.0, 4.0, 4.0)
    drifts.add(2)
    drifts.synchronised(1)
    assert drifts.weights() == (2.0, 0.0, 6.0)
    drifts.synchronised(None)
    assert drifts.weights() == (0.0, 0.0, 0.0)
    equal = DriftSamples("equal", 2)
    equal.add(7)
    equal.synchronised(1)
    assert equal.weights() == (1.0, 0.0)


def made(kind: type[Any], rank: int, bus: Bus) -> tuple[nn.ParameterList, Any]:
    """Three parameters in two fragments: the first two, and the last."""
    values = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    model = nn.ParameterList([*values, torch.zeros(4, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = kind(
        list(model.parameters()),
        model,
        lambda: [optimizer],
        bus.group(rank),
        fragments=2,
    )
    averager.build()
    return model, averager


def moved(model: nn.ParameterList, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def held(model: nn.ParameterList) -> list[float]:
    """The value of each parameter, the same in all its elements."""
    assert all(bool((p == p[0]).all()) for p in model.parameters())
    return [float(p.detach()[0]) for p in model.parameters()]


def test_each_fragment_drifts_from_its_own_base() -> None:
    """One rank by itself, whose outer step doubles what a fragment has drifted."""
    model, averager = made(ParameterAverager, 0, Bus(1))
    step: dict[str, Any] = {"weight": 1.0, "active_ranks": 1, "outer": "nesterov"}
    step |= {"outer_lr": 2.0, "outer_momentum": 0.0}
    moved(model, 1.0)
    averager.synchronise(plan(fragment=0, **step), (1.0, 1.0))
    assert held(model) == [2.0, 2.0, 1.0]
    moved(model, 1.0)
    result = averager.synchronise(plan(fragment=1, **step), (1.0, 1.0))
    assert held(model) == [3.0, 3.0, 4.0]
    # Of θ_k: 2 in four elements, 4 in the other four.
    assert result.parameter_norm == pytest.approx(math.sqrt(4 * 4 + 4 * 16))
    averager.synchronise(plan(fragment=None, **step), (1.0, 1.0))
    assert held(model) == [4.0, 4.0, 4.0]


def test_a_rank_that_trained_in_an_earlier_window_only_still_counts() -> None:
    ranks = [made(OverlappedAverager, rank, bus) for bus in [Bus(2)] for rank in (0, 1)]
    moved(ranks[0][0], 4.0)
    moved(ranks[1][0], 2.0)
    drifts = [DriftSamples("equal", 2) for _ in ranks]
    for window, trained in enumerate(((1, 1), (0, 1), (0, 0))):
        is_last = window == 2
        plans = [
            plan(
                rank,
                window=window,
                weight=float(trained[rank]),
                fragment=None if is_last else window % 2,
            )
            for rank in (0, 1)
        ]
        for rank, (_, averager) in enumerate(ranks):
            drifts[rank].add(trained[rank])
            fragment = window % 2
            averager.snapshot(
                drifts[rank].weights()[fragment],
                begins=trained[rank] > 0,
                fragment=fragment,
            )
        for rank, (_, averager) in enumerate(ranks):
            averager.begin(plans[rank], drifts[rank].weights())
            drifts[rank].synchronised(plans[rank].fragment)
        for rank, (_, averager) in enumerate(ranks):
            assert averager.poll()
            averager.adopt(plans[rank], drained=True)
    # The mean of both in both fragments, though rank 0 trained in the first one only.
    assert held(ranks[0][0]) == held(ranks[1][0]) == [3.0, 3.0, 3.0]


def test_buffers_are_the_mean_of_those_who_trained_in_this_window() -> None:
    """Once: a rank whose fragment drifted in an earlier window counted without being
    one of those that the sum was divided by, and a running variance doubled."""
    bus = Bus(2)
    ranks: list[tuple[nn.BatchNorm1d, OverlappedAverager]] = []
    for rank in (0, 1):
        model = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parameters = list(model.parameters())
        averager = OverlappedAverager(
            parameters, model, lambda o=optimizer: [o], bus.group(rank), fragments=2
        )
        averager.build()
        ranks.append((model, averager))
    for window, trained in enumerate(((1, 1), (1, 0))):
        for rank, (model, averager) in enumerate(ranks):
            assert model.running_var is not None
            if trained[rank]:
                model.running_var.fill_(4.0 + 2.0 * rank)
            # Fragment 1 has had no turn: it weighs what was trained in window 0.
            averager.snapshot(1.0, fragment=window, has_trained=trained[rank] > 0)
        for rank, (_, averager) in enumerate(ranks):
            reduction = plan(
                rank,
                window=window,
                weight=trained[rank] / sum(trained),
                active_ranks=sum(trained),
                fragment=window,
                buffers=(0, 1, 2),
            )
            averager.begin(reduction, (1.0, 1.0))
        for _, averager in ranks:
            assert averager.poll()
            averager.adopt(plan(window=window), drained=True)
        expected = 5.0 if window == 0 else 4.0
        for model, _ in ranks:
            assert model.running_var is not None
            assert model.running_var.tolist() == [expected] * 2


@pytest.mark.parametrize("kind", [ParameterAverager, OverlappedAverager])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_went_astray_comes_back_in_all_fragments(
    kind: type[Any], bad: int
) -> None:
    """Wherever it is no number; what it had drifted in the other fragment is lost."""
    model, averager = made(kind, 0, Bus(1))
    moved(model, 1.0)
    with torch.no_grad():
        model[bad].fill_(float("nan"))
    reduction = plan(weight=0.0, active_ranks=0, fragment=1)
    if isinstance(averager, OverlappedAverager):
        assert not averager.snapshot(1.0, fragment=1)
        averager.begin(reduction, (1.0, 1.0))
        averager.adopt(reduction)
    else:
        averager.synchronise(reduction, (1.0, 1.0), is_finite=False)
    assert held(model) == [0.0, 0.0, 0.0]


def test_turns_that_are_not_there_are_refused() -> None:
    _, averager = made(ParameterAverager, 0, Bus(1))
    with pytest.raises(ProtocolError, match="expected one of 2 fragments, got 2"):
        averager.synchronise(plan(fragment=2), (1.0, 1.0))
    _, averager = made(OverlappedAverager, 0, Bus(1))
    averager.snapshot(1.0, fragment=0)
    with pytest.raises(ProtocolError, match="expected fragment 0, whose drift was t"):
        averager.begin(plan(fragment=1), (1.0, 1.0))


def test_a_reduction_of_all_fragments_is_begun_again_in_another_group() -> None:
    """Each with the weight that it had."""
    model, averager = made(OverlappedAverager, 0, Bus(2))
    moved(model, 3.0)
    averager.snapshot(1.0, fragment=1)
    reduction = plan(weight=1.0, active_ranks=1)
    averager.begin(reduction, (2.0, 1.0))
    averager.connect(Bus(1).group(0))
    averager.begin(reduction, (0.0, 0.0))
    averager.adopt(reduction, drained=True)
    assert held(model) == [3.0, 3.0, 3.0]
