"""Weight missing from ranks whose loop has left an epoch of ``sync``."""

from __future__ import annotations

import pytest

from elche.runtime.sync.step_account import Step


@pytest.mark.parametrize(("number", "part"), [(2, 0.0), (3, 0.5), (4, 0.5)])
def test_a_rank_is_missing_after_the_last_pass_that_it_has_come_to(
    number: int, part: float
) -> None:
    lost = Step(7, 3, (3, 4, 1, 0)).lost(number, gone={1: 2})
    assert lost.samples == part
    assert lost.ranks == pytest.approx(part * 2 / 3)
