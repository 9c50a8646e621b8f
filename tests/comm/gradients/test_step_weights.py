"""Weights of a step's parts: what is sent of them rounds nothing."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.gradients.step_weights import reference_of

weights = st.floats(1e-9, 1e15)


@given(total=weights)
def test_the_reference_is_the_least_power_of_two_above(total: float) -> None:
    reference = reference_of(total)
    assert math.frexp(reference)[0] == 0.5
    assert reference / 2 <= total < reference


@given(own=weights, others=weights, last=weights, gradient=st.floats(1e-3, 1e3))
def test_a_step_has_the_same_bits_whatever_the_last_one_weighed(
    own: float, others: float, last: float, gradient: float
) -> None:
    """Of a gradient in float32, as the reducer sends and receives it."""
    total = own + others
    if own / total < 2**-20 or abs(math.log2(total / last)) > 20:
        return

    def mean_with(reference: float) -> float:
        sent = torch.tensor([gradient]).mul(own / reference)
        return float(sent.mul_(reference / total))

    assert mean_with(reference_of(last)) == mean_with(reference_of(total))
