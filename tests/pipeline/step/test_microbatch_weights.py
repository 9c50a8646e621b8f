"""Means over targets, and the values of a call that are cut, as in one process."""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_weight_cases import Means, piped, square_masks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("way", ["model's", "weighed"])
@pytest.mark.parametrize(
    ("schedule", "replicas"), [("1f1b", 1), ("zb-v", 1), ("1f1b", 2)]
)
def test_gradients_of_padded_batches_are_those_of_one_process(
    ranks2: RankPool, way: str, schedule: str, replicas: int
) -> None:
    work = Means(way, schedule, replicas)
    for gradients, loss, warned in ranks2.run(piped, work, case_setup=serve_in_thread):
        assert gradients <= 1e-12
        assert loss <= 1e-12
        assert warned == []


@pytest.mark.parametrize("how", ["traced", "whole", "learned", "unknown"])
def test_masks_between_positions_are_not_cut(ranks2: RankPool, how: str) -> None:
    for found in ranks2.run(square_masks, how, case_setup=serve_in_thread):
        if how == "unknown":
            assert "whole=('mask',)" in str(found.pop(0))
        assert all(isinstance(one, float) and one <= 1e-12 for one in found), found
