"""Averaging that is interrupted at a synchronisation and goes on elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import CommunicationError, MismatchError
from tests.comm.averaging.cases.overlap_cases import (
    STORE,
    all_changed,
    joined,
    local_step,
    state_of,
)
from tests.comm.plans import plan
from tests.distributed.patience import all_here, lose_patience
from tests.harness.rank_main import this_place


@dataclass(frozen=True)
class Work:
    """What is averaged, and how.

    Attributes:
        drains_at: a window whose end is a synchronisation even if it is overlapped.
        left_out: window and rank of a contribution that weighs nothing.
        is_no_number: because it is none; else that rank takes no steps.
        weights: of the ranks, in every window; None for equal ones.
    """

    is_overlapped: bool = False
    codec: str = "fp32"
    outer: str = "nesterov"
    dtype: str = "float32"
    transport: str = "gloo"
    drains_at: int = 2
    left_out: tuple[int, int] | None = None
    is_no_number: bool = False
    weights: tuple[float, ...] | None = None

    def plan(self, rank: int, window: int, world_size: int) -> Reduce:
        lacks_one = self.left_out is not None and self.left_out[0] == window
        active = world_size - lacks_one
        weight = 1 / active if self.weights is None else self.weights[rank]
        return plan(
            rank,
            window=window,
            weight=0.0 if self.left_out == (window, rank) else weight,
            active_ranks=active,
            outer=self.outer,
            outer_lr=1.0 if self.outer == "average" else 0.7,
            outer_momentum=0.6,
        )


@dataclass
class Saved:
    """What a rank holds at a synchronisation.

    Attributes:
        residuals: residual after each window.
        own: the part of the sum that this rank owns, where messages are encoded.
    """

    model: dict[str, torch.Tensor] = field(default_factory=dict)
    averager: dict[str, Any] = field(default_factory=dict)
    residuals: list[torch.Tensor] = field(default_factory=list)
    own: range = range(0)


def build(work: Work) -> nn.Module:
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(40, 30), nn.Linear(30, 7)])
    return model.to(getattr(torch, work.dtype))


def train(work: Work, first: int, last: int, saved: Sequence[Saved] | None) -> Saved:
    """Windows ``first <= window < last`` on this rank, from what was saved before."""
    place = this_place()
    model = build(work)
    if saved is not None:
        model.load_state_dict(saved[place.rank].model)
    with joined(work.transport) as group, joined("gloo", name="control") as control:
        averager = averager_of(work, model, group)
        if saved is not None:
            averager.load_state_dict(saved[place.rank].averager)
        found = Saved()
        for window in range(first, last):
            reduction = work.plan(place.rank, window, place.world_size)
            if work.is_no_number and reduction.weight == 0.0:
                next(iter(model.parameters())).data.fill_(float("nan"))
            _window(model, averager, reduction, control, _is_drained(work, window))
            for state in (each.state_dict() for each in averager._groups):
                if state["residual"] is not None:
                    found.residuals.append(state["residual"])
        _leave(averager, control)
        found.model, found.averager = state_of(model), averager.state_dict()
        exchange = averager._groups[0].exchange
        if isinstance(exchange, CodedExchange):
            found.own = exchange._hops.own
    return found


def averager_of(
    work: Work, model: nn.Module, group: Group
) -> ParameterAverager | OverlappedAverager:
    kind = OverlappedAverager if work.is_overlapped else ParameterAverager
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = kind(
        list(model.parameters()), model, lambda: [optimizer], group, codec=work.codec
    )
    averager.build()
    return averager


@dataclass
class Bereaved:
    """What a survivor holds, and what encoding had left out of its messages.

    Attributes:
        model: at the end.
        left_out: before a rank died.
        carried: the same in the survivors' group.
    """

    model: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[torch.Tensor] = field(default_factory=list)
    carried: list[torch.Tensor] = field(default_factory=list)


def lose_a_rank(work: Work) -> Bereaved:
    """The last rank is not there for the second reduction; the others do it again."""
    place, found = this_place(), Bereaved()
    last, model = place.world_size - 1, build(work)
    with joined("gloo") as group, joined("gloo", name="control") as control:
        averager = averager_of(work, model, group)
        _window(model, averager, work.plan(place.rank, 0, last + 1), control, True)
        found.left_out = [_residual(each) for each in averager._groups]
        all_here(os.environ[STORE])
        lose_patience(group, 1.0)
        if place.rank == last:
            _flush(averager)
            group.close()  # as its death would: nobody waits for the deadline
            all_here(os.environ[STORE], "failed")
            return found
        plan = work.plan(place.rank, 1, last + 1)
        local_step(model, place.rank, 10)
        try:
            if isinstance(averager, ParameterAverager):
                averager.synchronise(plan)
            else:
                averager.snapshot(1.0)
                averager.begin(plan)
                averager.adopt(plan, drained=True)
        except CommunicationError:
            all_here(os.environ[STORE], "failed")
    with joined("gloo", members=tuple(range(last))) as group:
        averager.connect(group)
        found.carried = [_residual(each) for each in averager._groups]
        again = work.plan(place.rank, 1, last)
        if isinstance(averager, ParameterAverager):
            averager.synchronise(again)
        else:
            averager.begin(again)
            averager.adopt(again, drained=True)
        _leave(averager, group)
    found.model = state_of(model)
    return found


def _residual(group: ParameterGroup) -> torch.Tensor:
    residual = group.state_dict()["residual"]
    return torch.zeros(0) if residual is None else residual


def load_others(work: Work, states: Sequence[dict[str, Any]]) -> list[str]:
    """Every rank loads its state; what it is told, and what it holds afterwards."""
    rank = this_place().rank
    model = build(work)
    with joined("gloo") as group:
        averager = averager_of(work, model, group)
        try:
            averager.load_state_dict(states[rank])
            told = ""
        except MismatchError as error:
            told = str(error)
        momenta = [each["momentum"] for each in averager.state_dict()["groups"]]
    return [told, "none" if momenta == [None] else "loaded"]


def _is_drained(work: Work, window: int) -> bool:
    return window % (work.drains_at + 1) == work.drains_at


def _window(
    model: nn.Module,
    averager: ParameterAverager | OverlappedAverager,
    reduction: Reduce,
    control: Group,
    is_drained: bool,
) -> None:
    """Two steps and their mean; overlapped, a third one comes before the mean."""
    rank, number = reduction.rank, 10 * reduction.window
    if reduction.weight > 0:
        local_step(model, rank, number)
        local_step(model, rank, number + 1)
    if isinstance(averager, ParameterAverager):
        all_changed(control, ())
        averager.synchronise(reduction)
        return
    is_diverged = not all(p.isfinite().all() for p in model.parameters())
    averager.snapshot(1.0 if is_diverged else reduction.weight)
    all_changed(control, ())
    averager.begin(reduction)
    if not is_drained:
        local_step(model, rank, number + 2)
    averager.adopt(reduction, drained=is_drained)


def _leave(averager: ParameterAverager | OverlappedAverager, control: Group) -> None:
    """Nobody closes its group before all have received."""
    _flush(averager)
    control.all_reduce(torch.zeros(1), "all ranks to be through")


def _flush(averager: ParameterAverager | OverlappedAverager) -> None:
    for each in averager._groups:
        if isinstance(each.exchange, CodedExchange):
            each.exchange.flush("a test")
