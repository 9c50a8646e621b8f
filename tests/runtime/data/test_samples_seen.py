"""Every sample is seen once by one loop, by the loops' own logs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.data.cases.seen_cases import Job, Seen, watch

pytestmark = pytest.mark.distributed
NEW_RANKS = True

RANKS = 3


@pytest.mark.parametrize(
    "job",
    [
        Job("sync"),
        Job("auto", norm=True, samples=7 * 40 + 5),
        Job("sync", options=(("max_samples", {0: 2, 1: 3}),)),
    ],
    ids=str,
)
def test_each_sample_is_seen_once(ranks3: RankPool, job: Job) -> None:
    """First steps of any length make shares of any size: each rank has its own.

    Only of a tail with fewer samples than the least of all ranks some are seen twice,
    and weigh nothing then.
    """
    logs = ranks3.run(watch, job, case_setup=serve_in_thread)
    tail = job.samples - job.samples % job.batch_size
    everything = list(range(job.samples))
    for epoch in range(2):
        seen = [batch for log in logs for batch in log if batch.epoch == epoch]
        assert sorted(_indices(seen, 1.0)) == everything
        all_seen = Counter(_indices(seen, 0.0))
        assert {
            index: n for index, n in all_seen.items() if n > 1 and index < tail
        } == {}
        weights = [batch.weight for batch in seen if batch.weight]
        assert weights == [len(batch.indices) for batch in seen if batch.weight]


def _indices(seen: list[Seen], weight: float) -> list[int]:
    """What was seen in batches of at least this weight."""
    return [i for batch in seen if batch.weight >= weight for i in batch.indices]


def test_a_rank_without_samples_of_a_tail_weighs_nothing(ranks3: RankPool) -> None:
    logs = ranks3.run(watch, Job("sync", samples=16), case_setup=serve_in_thread)
    for log in logs:
        assert len(log) == 2 * 3  # every rank runs every step
    tails = [(len(log[2].indices), log[2].weight) for log in logs]
    assert sorted(weight for _, weight in tails) == [0.0, 1.0, 1.0]
    assert {samples for samples, _ in tails} == {1}
