"""Weight missing from ranks whose loop has left an epoch of ``sync``."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elche.coordination.protocol.instructions import RankLeft
from elche.runtime.sync.left_ranks import LeftRanks
from elche.runtime.sync.step import Step


@pytest.mark.parametrize(
    ("number", "samples", "ranks"), [(2, 0.0, 0.0), (3, 0.5, 0.5), (4, 0.5, 0.5)]
)
def test_a_rank_is_missing_after_the_last_pass_that_it_has_come_to(
    number: int, samples: float, ranks: float
) -> None:
    left = LeftRanks(cast(Any, None), 0)
    left.add(RankLeft(rank=0, epoch=0, gone=1, passes=2))
    lost = left.lost(Step(7, 3, (3, 4, 1, 0)), number)
    assert lost.samples == samples
    assert lost.ranks == pytest.approx(ranks * 2 / 3)
