"""Steps that ranks have left or break off, ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.gradients.part_weights import Lost, StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.model_buffers.buffers import BufferAverager
from tests.comm.gradients.reduced_net import (
    CAPS,
    Gradients,
    Net,
    alone,
    batch_of,
    gradients_of,
    nets,
)
from tests.comm.gradients.test_reducer import check, reducer_of
from tests.comm.thread_group import ThreadGroup, on_ranks

SIZES = (6, 2, 1)


@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
def test_a_rank_that_has_left_is_made_up_for_by_the_others(is_sum: bool) -> None:
    """By its part of the samples under mean losses, of the ranks under sums."""

    def run(group: ThreadGroup, model: Net) -> Gradients:
        reducer = reducer_of(model, group, 300)
        if is_sum:
            reducer.weights.sum_losses()
        reducer.attach()
        reducer.lost = lambda label, number: Lost(SIZES[0] / sum(SIZES), 1 / 3)
        part = StepPart(SIZES[group.rank] / sum(SIZES), len(SIZES), label="a step")
        if group.rank == 0:
            reducer.join_pass(part)
        else:
            reducer.begin_step(part)
            losses = model.losses(batch_of(group.rank, 0, SIZES[group.rank]))
            (losses.sum() if is_sum else losses.mean()).backward()
            reducer.end_step()
        return gradients_of(model)

    found = on_ranks(3, run, nets(3))
    expected = alone(0, (0, *SIZES[1:]))
    if is_sum:  # the mean over the ranks that are there, times those of the step
        factor = sum(SIZES[1:]) * len(SIZES) / 2
        expected = [None if g is None else g * factor for g in expected]
    check(found, expected)


class Counted(nn.Module):
    """A buffer that every forward pass raises."""

    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("level", torch.full((3,), 4.0))

    def forward(self, by: float) -> torch.Tensor:
        self.level += by
        return self.weight.sum()


@pytest.mark.parametrize(("samples", "level"), [(2, 6.0), (0, 8.0)])
def test_buffers_of_a_joining_rank_count_where_it_had_samples(
    samples: int, level: float
) -> None:
    def run(group: Any, model: Counted) -> list[float]:
        buffers = BufferAverager.for_model(model, group)
        reducer = GradientReducer([model.weight], group, 1, buffers)
        reducer.attach()
        active = 1 + (samples > 0)
        if group.rank:
            reducer.join_pass(StepPart(samples / 4, active, label="a step"))
        else:
            reducer.begin_step(StepPart(1 - samples / 4, active, label="a step"))
            model(4.0).backward()
            reducer.end_step()
        return model.level.tolist()

    assert on_ranks(2, run, [Counted(), Counted()]) == [[level] * 3] * 2


class OutOfMemoryError(RuntimeError):
    """A backward pass is broken off."""


def _break_off(module: nn.Module, inputs: object, hidden: torch.Tensor) -> None:
    """Has the backward pass fail before it comes to this module."""

    def fail(gradient: torch.Tensor) -> None:
        raise OutOfMemoryError

    hidden.register_hook(fail)


@pytest.mark.parametrize("shares_host", [True, False], ids=["shared", "collectives"])
@pytest.mark.parametrize("cap_bytes", CAPS.values(), ids=CAPS)
def test_a_backward_pass_that_is_rewound_is_reduced_once_and_whole(
    cap_bytes: int, shares_host: bool
) -> None:
    """Buckets that were not sent wait for all of their gradients again."""
    sizes = (5, 3)

    def run(group: ThreadGroup, model: Net) -> list[Gradients]:
        reducer = reducer_of(model, group, cap_bytes)
        reducer.attach()
        found = []
        for step in range(3):
            model.zero_grad()
            reducer.begin_step(StepPart(sizes[group.rank] / sum(sizes), 2))
            x = batch_of(group.rank, step, sizes[group.rank])
            if group.rank == 0 and step:
                hook = model.body[0].register_forward_hook(_break_off)
                with pytest.raises(OutOfMemoryError):
                    model.losses(x).mean().backward()
                hook.remove()
                model.zero_grad()
                reducer.rewind()
            model.losses(x).mean().backward()
            reducer.end_step()
            found.append(gradients_of(model))
        assert reducer.backward_passes == 3
        return found

    ranks = on_ranks(2, run, nets(2), shares_host=shares_host)
    for step in range(3):
        check([found[step] for found in ranks], alone(step, sizes))
