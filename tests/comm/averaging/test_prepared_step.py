"""A step that is worked out beforehand is the step that is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.averaging import parameter_memory
from elche.comm.averaging.outer import KINDS, OuterOptimizer, OuterStep
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.averaging.prepared_step import PreparedStep
from elche.comm.codec.background_exchange import BackgroundExchange, SumReader
from elche.comm.codec.codec import CODECS
from elche.comm.tensors.flat import FlatImage, FlatLayout
from elche.comm.transport.exchange import Exchange
from elche.errors import ProtocolError
from tests.comm.bus import Bus
from tests.comm.peers import Wire, exchanges

NUMEL = 700
LIMIT = 256


def image(layout: FlatLayout, seed: int) -> FlatImage:
    generator = torch.Generator().manual_seed(seed)
    return layout.over(torch.randn(NUMEL, generator=generator))


def reader(summed: torch.Tensor) -> SumReader:
    def read(start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(summed[start:stop])

    return read


@given(
    kind=st.sampled_from(KINDS),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=4),
)
def test_it_moves_what_a_step_at_once_moves(
    kind: str, momentum: float, weights: list[float]
) -> None:
    layout = FlatLayout([torch.zeros(NUMEL)], torch.float32, LIMIT)
    rule = OuterStep(kind, 1.0 if kind == "average" else 0.7, momentum)
    base, other = image(layout, 1), image(layout, 1)
    outer, plain = OuterOptimizer(base.flat), OuterOptimizer(other.flat)
    for number, weight in enumerate(weights):
        drift = image(layout, 10 + number)
        first = drift.flat.clone()
        summed = torch.cat([image(layout, 20 + number).flat, torch.tensor([weight])])
        mean = summed[:-1] / (weight or 1.0)
        before = base.flat.clone()
        held = None if outer.momentum is None else outer.momentum.clone()
        step = PreparedStep(
            layout.segments,
            outer,
            rule,
            base=base,
            drift=drift,
            scratch=(layout.scratch(), layout.scratch()),
        )
        step.work_out(reader(summed))
        assert torch.equal(base.flat, before)  # it may be that nobody adopts it
        assert (held is None) == (outer.momentum is None)
        if held is not None:
            assert torch.equal(outer.momentum, held)
        distance = float((first - mean).square().sum())
        assert step.distance == pytest.approx(distance, rel=1e-4)

        step.take()
        for segment in layout.segments:
            part = torch.cat([image(layout, 20 + number).flat])
            part = part[segment.start : segment.stop]
            if weight > 0.0 and weight != 1.0:
                part.mul_(1.0 / weight)
            plain.step(segment.start, part, rule)
        assert torch.equal(base.flat, other.flat)
        assert step.size == pytest.approx(float(base.flat.square().sum()), rel=1e-4)
        moved = before - base.flat
        torch.testing.assert_close(drift.flat, first - moved)


def test_a_sum_that_is_no_number_makes_a_step_that_is_none() -> None:
    layout = FlatLayout([torch.zeros(NUMEL)], torch.float32, LIMIT)
    base, drift = image(layout, 1), image(layout, 2)
    step = PreparedStep(
        layout.segments,
        OuterOptimizer(base.flat),
        OuterStep("nesterov", 0.7, 0.5),
        base=base,
        drift=drift,
        scratch=(layout.scratch(), layout.scratch()),
    )
    step.work_out(reader(torch.full((NUMEL + 1,), torch.nan)))
    assert base.flat.isfinite().all()
    assert step.distance != step.distance
    assert drift.flat.isnan().all()


class Nobody:
    """A driver that does nothing by itself."""

    def serve(self, driven: object) -> None:
        pass


def opened() -> tuple[Wire, list[BackgroundExchange]]:
    wire, ends = exchanges(2, CODECS["int8"], NUMEL + 1)
    return wire, [BackgroundExchange(end, Nobody()) for end in ends]


@pytest.mark.parametrize("is_in_time", [False, True])
def test_no_step_is_made_of_a_sum_that_comes_after_a_new_group(
    monkeypatch: pytest.MonkeyPatch, is_in_time: bool
) -> None:
    """What is sent again lies where the step would; after the step it cannot be."""
    wire, ends = opened()
    _, others = opened()
    made: list[Exchange] = [ends[0]]

    def open_next(*_: object) -> Exchange:
        if made:
            return made.pop()
        wire.late.clear()  # the old group's sum comes while the new one is formed
        wire.deliver()
        ends[0].drive()
        return others[0]

    monkeypatch.setattr(parameter_memory, "open_coded_exchange", open_next)
    parameter = nn.Parameter(torch.zeros(NUMEL))
    group = ParameterGroup([parameter], torch.float32, is_overlapped=True)
    group.connect(Bus(2).group(0), "int8")
    with torch.no_grad():
        group.rebase()
        parameter.add_(1.0)
        wire.late.add(1)
        ends[1].contribution(0).fill_(2.0)
        ends[1].begin(0)
        ends[1].drive()
        assert group.fill(1.0)
        group.begin()
        group.prepare(OuterStep("average", 1.0, 0.0), lambda: True)
        ends[0].drive()
        if is_in_time:
            wire.late.clear()
            wire.deliver()
            ends[0].drive()
            with pytest.raises(ProtocolError, match="expected it to be adopted first"):
                group.connect(Bus(2).group(0), "int8")
            return
        group.connect(Bus(2).group(0), "int8")
        group.refill()
    assert others[0].contribution(0).tolist() == [-1.0] * NUMEL + [1.0]
