"""Steps of one rank: whose weight is missing, what a drain and a death leave."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from elche.coordination.protocol.instructions import LeaveOut
from elche.errors import ConfigError
from elche.runtime.sync.delayed_steps import DelayedSteps
from elche.runtime.sync.step_account import Step
from elche.runtime.sync.step_groups import StepGroups


@pytest.mark.parametrize(("number", "part"), [(2, 0.0), (3, 0.5), (4, 0.5)])
def test_a_rank_is_missing_after_the_last_pass_that_it_has_come_to(
    number: int, part: float
) -> None:
    lost = Step(7, 3, (3, 4, 1, 0)).lost(number, gone={1: 2})
    assert lost.samples == part
    assert lost.ranks == pytest.approx(part * 2 / 3)


def test_steps_after_a_drain_begin_at_what_it_left() -> None:
    """A sum moves the parameter by 1, and the loop's is as far ahead."""
    parameter, seen = nn.Parameter(torch.zeros(1)), []
    steps, sums = DelayedSteps(lambda: parameter.data.add_(1.0)), Mock()
    steps.attach(sums, [parameter])
    for has_sums in (False, True, None, False, True):
        sums.has_sums = has_sums
        steps.drain() if has_sums is None else steps.step()
        seen.append(parameter.item())
    assert seen == [0.0, 2.0, 2.0, 2.0, 4.0]


def test_ranks_that_were_left_out_are_met_again_after_a_death() -> None:
    worker = Mock(place=1, members=[0, 1, 2])
    groups = StepGroups(worker, *(Mock() for _ in range(5)))
    groups.exclude(LeaveOut(rank=1, epoch=0, left_out=(2,), reason=""))
    groups.is_apart = True
    with pytest.raises(ConfigError, match=r"ranks \[2\] are excluded from steps"):
        groups.meet("elche.any")
    groups.take_back(rebuilds=False)
    groups.meet("elche.any")
