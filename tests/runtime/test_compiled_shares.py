"""Compiled models under shares of several sizes: compiled once."""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.runtime.cases.compiled_cases import compiled_run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["before", "after"])
def test_shares_of_several_sizes_are_compiled_for_at_once(
    ranks2: RankPool, how: str
) -> None:
    """Made after `elche.setup` it is unknown, and Dynamo sees at the second size."""
    found = ranks2.serve(
        compiled_run,
        how,
        "auto",
        env=[{"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "0.1"}] * 2,
    )
    for graphs, sizes in found:
        assert len(sizes - {1}) >= 2
        # Dynamo compiles for a batch of one apart, whatever it is told.
        assert graphs <= (2 if how == "after" else 1) + (1 in sizes)
