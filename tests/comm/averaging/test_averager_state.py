"""When a committed state can be saved, and what is made of one that hardly fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import Averager, ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.errors import MismatchError, ProtocolError
from tests.comm.bus import Bus
from tests.comm.plans import plan

ALONE: dict[str, Any] = {"weight": 1.0, "active_ranks": 1, "outer": "slowmo"}


def made(
    kind: type[Averager], dtype: torch.dtype = torch.float32
) -> tuple[nn.Parameter, Any]:
    """One parameter of three elements, and its averager, of a rank by itself."""
    last = 3.0 if kind is OverlappedAverager else float("nan")
    model = nn.ParameterList([torch.tensor([1.0, 2.0, last], dtype=dtype)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameter = next(iter(model.parameters()))
    averager = kind([parameter], model, lambda: [optimizer], Bus(1).group(0))
    averager.build()
    return parameter, averager


def moved(parameter: nn.Parameter, by: float) -> None:
    with torch.no_grad():
        parameter.add_(by)


@pytest.mark.parametrize("kind", [ParameterAverager, OverlappedAverager])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_that_of_a_synchronisation(
    kind: type[Averager], dtype: torch.dtype
) -> None:
    """Elements that are no numbers, and stay that, have not moved."""
    parameter, averager = made(kind, dtype)
    before = averager.state_dict()
    moved(parameter, 1.0)
    with pytest.raises(ProtocolError, match="the parameters have changed since the"):
        averager.state_dict()
    reduction = plan(**ALONE)
    if isinstance(averager, OverlappedAverager):
        averager.snapshot(1.0)
        for call in (averager.state_dict, lambda: averager.load_state_dict(before)):
            with pytest.raises(ProtocolError, match="called when a drift has been"):
                call()
        averager.begin(reduction)
        averager.finish(reduction, is_drained=True)
    else:
        averager.reduce(reduction)
    after = averager.state_dict()
    assert before["groups"][0]["momentum"] is None
    assert after["groups"][0]["momentum"][:2].tolist() == [-1.0, -1.0]
    assert (after["groups"][0]["base"] is None) is (dtype == torch.float32)
    after["groups"][0]["momentum"].zero_()  # a copy
    assert averager.state_dict()["groups"][0]["momentum"][0] == -1.0
    if dtype == torch.bfloat16:
        with pytest.raises(MismatchError, match="is not the saved one"):
            averager.load_state_dict(before)
        moved(parameter, -1.0)
    averager.load_state_dict(before)
    assert averager.state_dict()["groups"][0]["momentum"] is None


@pytest.mark.parametrize("state", [[1], "a state", 3, torch.zeros(3)])
def test_what_is_no_state_is_refused(state: Any) -> None:
    _, averager = made(ParameterAverager)
    says = f"expected a state of averaging, got {type(state).__name__}"
    with pytest.raises(MismatchError, match=says):
        averager.load_state_dict(state)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"residual": 3}, "expected a residual of 3 elements of float32, got int"),
        ({"residual": torch.ones(2)}, r"a residual of 3 .*, got \[2\] of float32"),
        ({"residual": {"own": (0, 0)}}, "a residual of 3 elements .*, got dict"),
        ({"momentum": 3}, "expected a momentum of 3 elements of float32, got int"),
    ],
)
def test_an_entry_that_is_something_else_is_refused(
    entry: dict[str, Any], says: str
) -> None:
    _, averager = made(ParameterAverager)
    state = averager.state_dict()
    state["groups"][0].update(entry)
    with pytest.raises(MismatchError, match=says):
        averager.load_state_dict(state)


def test_a_residual_is_sent_where_there_is_no_codec_any_more() -> None:
    parameter, averager = made(ParameterAverager)
    state = averager.state_dict()
    state["groups"][0]["residual"] = torch.ones(3)
    averager.load_state_dict(state)
    held = averager.state_dict()["groups"][0]["residual"]
    assert held.tolist() == [1.0] * 3
    before = parameter.detach().clone()
    averager.reduce(plan(weight=0.0, active_ranks=0))  # nothing of it is sent
    assert averager.state_dict()["groups"][0]["residual"].tolist() == [1.0] * 3
    averager.reduce(plan(weight=1.0, active_ranks=1))
    assert torch.equal(parameter.detach()[:2], before[:2] - 1.0)
    assert averager.state_dict()["groups"][0]["residual"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "expected version 1, got 2"),
        ({"groups": []}, "expected 1 groups of parameters, of float32; the state is"),
        ({"groups": [{"dtype": "float32"}]}, r"with entries .*, got \['dtype'\]"),
        ({"groups": [None]}, "groups of parameters with entries .*, got NoneType"),
        ({"groups": [{1: 2, "dtype": 3}]}, r"with entries .*, got \['1', 'dtype'\]"),
        ({"groups": 3}, "expected 1 groups of parameters"),
    ],
)
def test_another_layout_is_refused(changes: dict[str, Any], says: str) -> None:
    parameter, averager = made(ParameterAverager)
    state = averager.state_dict()
    moved(parameter, 1.0)
    with pytest.raises(MismatchError, match=says):
        averager.load_state_dict({**state, **changes})
    with pytest.raises(ProtocolError, match="the parameters have changed"):
        averager.state_dict()  # what is common is what it was
