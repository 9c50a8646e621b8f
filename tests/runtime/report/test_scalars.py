"""Logged scalars: weighted sums, read back without waiting for the device."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.runtime.report.scalars import BUFFER_VALUES, ScalarLog


def test_sums_are_weighted() -> None:
    log = ScalarLog()
    log.log("loss", 2.0, 3)
    log.log("loss", torch.tensor([[4.0]]), 1.0)
    log.log("hits", True, 2)
    log.log("count", torch.tensor(7), 2)
    assert log.drain() == (
        ("count", 14.0, 2.0),
        ("hits", 2.0, 2.0),
        ("loss", 10.0, 4.0),
    )
    assert log.drain() == ()


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.integers(1, 512).map(float), st.booleans()),
        min_size=1,
    )
)
def test_sums_are_exact(logged: list[tuple[float, float, bool]]) -> None:
    log = ScalarLog()
    for value, weight, as_tensor in logged:
        double = torch.tensor(value, dtype=torch.float64)
        log.log("loss", double if as_tensor else value, weight)
    weighted_sum = math.fsum(value * weight for value, weight, _ in logged)
    total = sum(weight for _, weight, _ in logged)
    assert log.drain(final=True) == (("loss", weighted_sum, total),)


def test_more_values_than_a_buffer_holds() -> None:
    log, count = ScalarLog(), 2 * BUFFER_VALUES + 3
    for number in range(count):
        log.log("loss", torch.tensor(float(number)), 2.0)
    total = float(count * (count - 1))
    assert log.drain(final=True) == (("loss", total, 2.0 * count),)


def test_what_is_logged_may_be_overwritten_and_dropped() -> None:
    log = ScalarLog()
    loss = torch.ones((), requires_grad=True) * 2.0
    log.log("loss", loss, 1.0)
    loss.detach().add_(10.0)
    alive = weakref.ref(loss)
    del loss
    gc.collect()
    assert alive() is None
    assert log.drain(final=True) == (("loss", 2.0, 1.0),)


def test_inference_mode_and_training_share_a_buffer() -> None:
    log = ScalarLog()
    with torch.inference_mode():
        log.log("loss", torch.tensor(1.0), 1.0)
    log.log("loss", torch.tensor(2.0), 1.0)
    assert log.drain(final=True) == (("loss", 3.0, 2.0),)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(bad: float) -> None:
    """They count one each, whatever their weight; the others' sum stands."""
    log = ScalarLog()
    log.log("loss", bad, 32.0)
    log.log("loss", torch.tensor(bad), 32.0)
    log.log("loss", 3.0, 2.0)
    assert log.drain(final=True) == (("loss", 6.0, 2.0), ("loss", math.inf, 2.0))


def test_a_sum_beyond_the_range_of_floats() -> None:
    log = ScalarLog()
    log.log("big", 1.7e308, 1.0)
    log.log("big", 1.7e308, 1.0)
    assert log.drain() == (("big", math.inf, 1.0),)
    log.log("big", 1.7e308, 2.0)
    assert log.drain() == (("big", math.inf, 1.0),)


def test_weight_zero_adds_nothing() -> None:
    """A rank without samples in a step runs on others', and its loss is no one's."""
    log = ScalarLog()
    log.log("loss", math.nan, 0)
    log.log("loss", torch.tensor(1.0), 0.0)
    assert log.drain(final=True) == ()


@pytest.mark.parametrize(
    ("name", "value", "weight", "says"),
    [
        ("", 1.0, 1.0, "string of 1 to 200 characters, got ''"),
        ("x" * 201, 1.0, 1.0, "string of 1 to 200 characters, got 'xxx"),
        (3, 1.0, 1.0, "string of 1 to 200 characters, got '3'"),
        ("loss", "1.0", 1.0, "'loss': expected a real number or a tensor of one, got"),
        ("loss", None, 1.0, "got 'None' of type NoneType"),
        ("loss", 1j, 1.0, "got '1j' of type complex"),
        ("loss", 10**400, 1.0, "expected a real number .* of type int"),
        ("loss", torch.ones(2), 1.0, r"got a tensor of shape \[2\] and torch.float32"),
        ("loss", torch.ones(0), 1.0, r"got a tensor of shape \[0\]"),
        ("loss", torch.tensor(1j), 1.0, "expected one real number, .* torch.complex64"),
        ("loss", 1.0, -1.0, "weight that is finite and not negative, got -1.0"),
        ("loss", 1.0, math.nan, "weight that is finite and not negative, got nan"),
        ("loss", 1.0, math.inf, "weight that is finite and not negative, got inf"),
        ("loss", 1.0, "2", "weight that is finite and not negative, got '2'"),
        ("loss", "a", 0, "expected a real number"),
    ],
)
def test_wrong_arguments(name: Any, value: Any, weight: Any, says: str) -> None:
    log = ScalarLog()
    with pytest.raises(ConfigError, match=says):
        log.log(name, value, weight)
    assert log.drain(final=True) == ()
