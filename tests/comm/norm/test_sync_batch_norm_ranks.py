"""SyncBatchNorm between processes is one process on the union batch."""

from __future__ import annotations

import pytest
import torch

from tests.comm.norm.cases import sync_batch_norm_cases as cases
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

TWO = [[6, 2], [1, 7], [8, 0], [3, 5]]
THREE = [[4, 3, 1], [0, 8, 0], [2, 2, 4], [1, 1, 6]]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_unequal_parts_train_as_one_process(
    ranks2: RankPool, ranks3: RankPool, world_size: int, recompute: bool, transport: str
) -> None:
    pool, sizes = {2: (ranks2, TWO), 3: (ranks3, THREE)}[world_size]
    states = pool.run(
        cases.train_shared, sizes, transport, recompute, case_setup=serve_in_thread
    )
    whole = cases.train_alone(len(sizes), 8)
    assert identical(states)
    for name, value in whole.items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_rank_that_stays_away_is_named_with_the_layer(
    ranks2: RankPool, steps_before: int
) -> None:
    said = ranks2.run(
        cases.hang_without_one_rank, steps_before, case_setup=serve_in_thread
    )
    assert "the statistics of SyncBatchNorm 'first.1'" in said[0]
    assert said[0].startswith(("CommunicationError", "DeadlineError"))
    assert "ranks that did not arrive: 1" in said[0]
