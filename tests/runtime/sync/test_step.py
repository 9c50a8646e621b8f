"""Steps of one rank: whose weight is missing, and what a death leaves."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from elche.coordination.protocol.instructions import LeaveOut
from elche.errors import ConfigError
from elche.runtime.sync.step_account import Step
from elche.runtime.sync.step_groups import StepGroups


@pytest.mark.parametrize(("number", "part"), [(2, 0.0), (3, 0.5), (4, 0.5)])
def test_a_rank_is_missing_after_the_last_pass_that_it_has_come_to(
    number: int, part: float
) -> None:
    lost = Step(7, 3, (3, 4, 1, 0)).lost(number, gone={1: 2})
    assert lost.samples == part
    assert lost.ranks == pytest.approx(part * 2 / 3)


def test_ranks_that_were_left_out_are_met_again_after_a_death() -> None:
    worker = Mock(place=1, members=[0, 1, 2])
    groups = StepGroups(worker, *(Mock() for _ in range(5)))
    groups.exclude(LeaveOut(rank=1, epoch=0, left_out=(2,), reason=""))
    groups.is_apart = True
    with pytest.raises(ConfigError, match=r"ranks \[2\] are excluded from steps"):
        groups.meet("elche.any")
    groups.take_back(rebuilds=False)
    groups.meet("elche.any")
