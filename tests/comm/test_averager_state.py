"""When a committed state can be saved, and what is made of one that hardly fits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.averaging import Averager, ParameterAverager
from elche.comm.overlap import OverlappedAverager
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
    averager = kind([parameter], model, optimizer, Bus(1).group(0))
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
    with pytest.raises(ProtocolError, match="the parameters have moved since the last"):
        averager.state_dict()
    reduction = plan(**ALONE)
    if isinstance(averager, OverlappedAverager):
        averager.snapshot(1.0)
        for call in (averager.state_dict, lambda: averager.load_state_dict(before)):
            with pytest.raises(ProtocolError, match="came when a drift has been sent"):
                call()
        averager.begin(reduction)
        averager.adopt(reduction, drained=True)
    else:
        averager.synchronise(reduction)
    after = averager.state_dict()
    assert before["groups"][0]["momentum"] is None
    assert after["groups"][0]["momentum"][:2].tolist() == [-1.0, -1.0]
    assert (after["groups"][0]["base"] is None) is (dtype == torch.float32)
    after["groups"][0]["momentum"].zero_()  # a copy
    assert averager.state_dict()["groups"][0]["momentum"][0] == -1.0
    if dtype == torch.bfloat16:
        with pytest.raises(MismatchError, match="does not hold what it held then"):
            averager.load_state_dict(before)
        moved(parameter, -1.0)
    averager.load_state_dict(before)
    assert averager.state_dict()["groups"][0]["momentum"] is None


def test_a_residual_without_a_codec_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, averager = made(ParameterAverager)
    state = averager.state_dict()
    state["groups"][0]["residual"] = {
        "residual": torch.ones(3),
        "own": (0, 0),
        "world_size": 2,
        "ranks": 1,
    }
    with caplog.at_level(logging.WARNING, "elche"):
        averager.load_state_dict(state)
    assert "a codec's residual is dropped" in caplog.text
    assert averager.state_dict()["groups"][0]["residual"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "expected version 1, got 2"),
        ({"groups": []}, "expected 1 groups of parameters, of float32; it belongs"),
        ({"groups": [{"dtype": "float32"}]}, r"expected entries .*, got \['dtype'\]"),
    ],
)
def test_another_layout_is_refused(changes: dict[str, Any], says: str) -> None:
    parameter, averager = made(ParameterAverager)
    state = averager.state_dict()
    moved(parameter, 1.0)
    with pytest.raises(MismatchError, match=says):
        averager.load_state_dict({**state, **changes})
    with pytest.raises(ProtocolError, match="the parameters have moved"):
        averager.state_dict()  # what is common is what it was
