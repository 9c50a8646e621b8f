"""Overlapped averaging: which call may come when, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ProtocolError
from tests.comm.bus import Bus, Member
from tests.comm.plans import plan
from tests.comm.thread_group import on_ranks


def made(
    group: Group, start: float = 1.0
) -> tuple[nn.Parameter, OverlappedAverager, torch.optim.Optimizer]:
    """One parameter of two elements, and its averager."""
    model = nn.ParameterList([torch.full((2,), start, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    parameter = next(iter(model.parameters()))
    averager = OverlappedAverager([parameter], model, lambda: [optimizer], group)
    averager.build()
    return parameter, averager, optimizer


def moved(parameter: nn.Parameter, by: float) -> None:
    with torch.no_grad():
        parameter.add_(by)


Calls = Callable[[OverlappedAverager], object]


@pytest.mark.parametrize(
    ("before", "call", "says"),
    [
        ("", lambda a: a.begin(plan()), r"begin\(\) was called when nothing has been"),
        ("", lambda a: a.poll(), r"poll\(\) was called when nothing has been"),
        ("", lambda a: a.finish(plan()), r"finish\(\) was called when nothing has"),
        ("s", lambda a: a.finish(plan()), r"finish\(\) was called when a drift has"),
        ("0", lambda a: a.finish(plan()), r"finish\(\) was called when a snapshot"),
        ("s", lambda a: a.snapshot(1.0), r"snapshot\(\) was called when a drift has"),
        ("sb", lambda a: a.snapshot(1.0), r"snapshot\(\) was called when a reduction"),
        ("0", lambda a: a.begin(plan()), "has not been sent"),
        ("s", lambda a: a.begin(plan(weight=0.0)), "of weight 0.0 in the plan, has"),
        ("sb", lambda a: a.begin(plan()), r"begin\(\) was called when a reduction"),
        ("sb", lambda a: a.rebase(), r"rebase\(\) was called when a reduction"),
        ("sb", lambda a: a.finish(plan(window=3)), "finish window 0, got 3"),
    ],
)
def test_calls_out_of_order_are_refused(before: str, call: Calls, says: str) -> None:
    parameter, averager, _ = made(Bus(2).group(0))
    if before:
        averager.snapshot(0.0 if before == "0" else 1.0)
    if "b" in before:
        averager.begin(plan())
    with pytest.raises(ProtocolError, match=says):
        call(averager)
    assert parameter.tolist() == [1.0, 1.0]


def test_a_window_without_a_reduction_is_forgotten() -> None:
    parameter, averager, _ = made(Bus(1).group(0))
    moved(parameter, 2.0)
    averager.snapshot(0.0)
    averager.rebase()
    moved(parameter, 1.0)
    averager.snapshot(0.0)
    averager.snapshot(1.0)
    averager.begin(plan(weight=1.0, active_ranks=1, outer="nesterov", outer_lr=3.0))
    averager.finish(plan(weight=1.0, active_ranks=1, outer="nesterov", outer_lr=3.0))
    # 3 + 3 × (1 + 0.5) × the drift of 1 that came after the rebase.
    assert parameter.tolist() == [7.5, 7.5]


@given(
    st.lists(
        st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.integers(-4, 4)),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from([1.0, 0.3]),
)
def test_steps_before_and_after_a_failure_are_kept(
    windows: list[tuple[int, int, int]], fails: bool, weight: float
) -> None:
    """A lone rank averages with itself: nothing may be lost or counted twice."""
    parameter, averager, _ = made(Bus(1).group(0))
    total = 1.0
    for number, (first, meanwhile, later) in enumerate(windows):
        reduction = plan(window=number, weight=1.0, active_ranks=1)
        moved(parameter, first)
        averager.snapshot(weight)
        if fails:
            averager.connect(Bus(2).group(0))
            averager.begin(reduction)
            moved(parameter, meanwhile)
            assert not averager.poll()
            with pytest.raises(CommunicationError, match="averaging parameters failed"):
                averager.finish(reduction)
            averager.connect(Bus(1).group(0))
        else:
            moved(parameter, meanwhile)
        averager.begin(reduction)
        moved(parameter, later)
        assert averager.poll()
        total += first + meanwhile + later
        averager.finish(reduction)
        assert parameter.tolist() == pytest.approx([total, total], abs=1e-12)


@pytest.mark.parametrize("mean_over", [1, 2])
def test_lbfgs_begins_anew_when_a_mean_is_adopted(mean_over: int) -> None:
    """Its curvature is read from how parameters moved; a mean moves them, too.

    Where one rank trains alone, for which batches are cut, nothing but its steps does.
    """
    model = nn.ParameterList([torch.ones(2)])
    optimizer = torch.optim.LBFGS(model.parameters())
    group = Bus(1).group(0)
    averager = OverlappedAverager(list(model), model, lambda: [optimizer], group)
    averager.build()
    optimizer.step(lambda: (model[0] ** 4).sum().backward() or 1.0)
    assert optimizer.state
    averager.snapshot(1.0)
    reduction = plan(weight=1.0, active_ranks=1, mean_over=mean_over)
    averager.begin(reduction)
    averager.finish(reduction)
    assert bool(optimizer.state) == (mean_over == 1)


def test_a_rank_whose_parameters_are_no_numbers_takes_those_of_the_others() -> None:
    ranks = [made(group) for group in Bus(2).groups()]
    for (parameter, averager, _), by in zip(ranks, (2.0, float("nan")), strict=True):
        moved(parameter, by)
        assert averager.snapshot(1.0) is (by == 2.0)
    plans = [plan(weight=weight, active_ranks=1) for weight in (1.0, 0.0)]
    for (_, averager, _), each in zip(ranks, plans, strict=True):
        averager.begin(each)
    found = [a.finish(p).divergence for (_, a, _), p in zip(ranks, plans, strict=True)]
    assert str(found) == "[0.0, nan]"
    assert [parameter.tolist() for parameter, _, _ in ranks] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(("by", "held"), [(2.0, 6.0), (float("nan"), 5.0)])
def test_a_result_of_another_rank_keeps_steps_that_are_numbers(
    by: float, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Member, "broadcast", lambda _, base, *more: base.fill_(5.0))
    parameter, averager, _ = made(Bus(2).group(0))
    moved(parameter, by)
    averager.snapshot(1.0)
    moved(parameter, 1.0)
    averager.copy_result(Bus(2).group(0), 1, plan(), lacks=True, keeps=True)
    assert parameter.tolist() == [held, held]


def test_weights_keep_their_scale_when_a_group_is_formed_anew() -> None:
    """One rank closed its window before the group changed, the other afterwards."""
    ranks = [made(group) for group in Bus(2).groups()]
    moved(ranks[0][0], 4.0)
    ranks[0][1].snapshot(64.0)
    for (_, averager, _), group in zip(ranks, Bus(2).groups(), strict=True):
        averager.connect(group)
    moved(ranks[1][0], 8.0)
    ranks[1][1].snapshot(64.0)
    for _, averager, _ in ranks:
        averager.begin(plan(attempt=1))
    for parameter, averager, _ in ranks:
        averager.finish(plan(attempt=1), is_drained=True)
        assert parameter.tolist() == [7.0, 7.0]


def test_a_reduction_may_be_left_to_its_plan() -> None:
    ranks = [made(group) for group in Bus(2).groups()]
    for rank, (parameter, averager, _) in enumerate(ranks):
        moved(parameter, 2.0 * rank)
        averager.snapshot(1.0, begins=False)
        with pytest.raises(ProtocolError, match="when a snapshot has been taken"):
            averager.poll()
    for _, averager, _ in ranks:
        averager.begin(plan())
    for parameter, averager, _ in ranks:
        averager.finish(plan(), is_drained=True)
        assert parameter.tolist() == [2.0, 2.0]


def test_a_drift_stays_apart_until_all_ranks_have_adopted_the_last_mean() -> None:
    """Ranks that share memory have one message: what it held is read until then."""
    has_closed = threading.Event()

    def run(group: Group) -> tuple[list[float], list[float], int]:
        parameter, averager, _ = made(group)
        held = averager.extra_bytes
        moved(parameter, (2.0, 4.0)[group.rank])
        averager.snapshot(1.0)
        averager.begin(plan())
        if group.rank == 1:
            assert has_closed.wait(timeout=60.0)
        averager.finish(plan(), is_drained=True)
        first = parameter.tolist()
        moved(parameter, (10.0, 0.0)[group.rank])
        averager.snapshot(1.0)
        assert averager._phase.name == ("UNSENT", "SENT")[group.rank]
        has_closed.set()
        averager.begin(plan(window=1))
        averager.finish(plan(window=1), is_drained=True)
        averager.connect(group)  # which keeps no adopted drift
        return first, parameter.tolist(), averager.extra_bytes - held

    found = on_ranks(2, run, shares_host=True)
    # One copy of 16 bytes more on the rank that did not wait.
    assert found == [([4.0] * 2, [9.0] * 2, 16), ([4.0] * 2, [9.0] * 2, 0)]


def test_memory_is_counted() -> None:
    _, averager, _ = made(Bus(1).group(0))
    # θ_k, the drift, a message, an outer momentum and two pieces that are worked on, of
    # 16 bytes each.
    assert averager.extra_bytes == 96
    for kind in ("nesterov", "slowmo"):  # the momentum was counted from the start
        averager.snapshot(1.0)
        step = plan(weight=1.0, active_ranks=1, outer=kind)
        averager.begin(step)
        averager.finish(step)
        assert averager.extra_bytes == 96
