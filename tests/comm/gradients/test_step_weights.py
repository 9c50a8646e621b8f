"""Weights of a step's parts: what is sent of them rounds nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.gradients.part_weights import (
    PartWeights,
    StepPart,
    StepWeights,
    reference_of,
)
from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.process_group import Group
from tests.comm.bus import Bus
from tests.comm.thread_group import on_ranks

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


class After:
    """The group after a death, whose source has sums multiplied by 3."""

    world_size, shares_host = 2, False

    def broadcast(self, tensor: torch.Tensor, what: str, source: int) -> None:
        if source == 1:
            tensor.fill_(3.0)


def test_after_a_death_weights_are_sent_by_the_next_total() -> None:
    """Of the last one some ranks may not have heard."""
    weights = StepWeights([], Bus(1).group(0))
    weights.attach()
    for side, weight in enumerate((100.0, 3.0)):
        weights.begin_step(weight)
        assert weights.open_pass(side) == weight / reference_of(weight)
        assert weights.close_pass() == reference_of(weight) / weight
        weights.continue_in(Bus(1).group(0), source=None)


def test_who_was_handed_sums_can_hand_them_on() -> None:
    """With what they are multiplied by, where another death comes before all have."""
    group: Any = After()
    weights = StepWeights([], group)
    assert weights.continue_in(group, source=1) == 3.0
    assert weights.continue_in(group, source=0) == 3.0


def test_where_nothing_weighs_all_keep_what_the_first_rank_has_accumulated() -> None:
    """Also where an earlier pass is a reference for the total."""

    def factor_of(group: Any) -> float:
        weights = StepWeights([], group)
        weights.attach()
        for side, weight in enumerate((2.0, 0.0)):
            weights.begin_step(weight)
            factor = weights.open_pass(side)
            assert weight or weights.close_pass() == 1.0
        return factor

    assert on_ranks(3, factor_of) == [1.0, 0.0, 0.0]


def test_normalisation_counts_no_part_of_weight_zero() -> None:
    norms = NormScope()
    weights = PartWeights([], Group.alone(1.0), norms)
    for weight, expected in ((None, 0.5), (0.0, 0.0)):
        weights.weigh(StepPart(0.5, 1, weight))
        assert norms.loss_weight == expected
