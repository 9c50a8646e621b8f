"""A script may call `elche.setup` again and again: nothing of an ended run is kept."""

from __future__ import annotations

import gc
import os

import pytest

import elche
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

RUNS = 10


def _open_after_each_run(policy: str) -> list[int]:
    """File descriptors after every run, with nobody looking for circles meanwhile."""
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(RUNS):
            model, optimizer, loader = begin(
                Task(samples=32, batch_size=8), policy=policy
            )
            for x, y, *_ in loader:
                take_step(model, optimizer, x, y)
            elche.shutdown()
            del model, optimizer, loader
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    return counts


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_runs_leave_no_descriptor_behind(ranks2: RankPool, policy: str) -> None:
    for counts in ranks2.serve(_open_after_each_run, policy):
        assert counts[-1] < counts[0] + RUNS // 2, counts  # one a run would be nine
