"""A script may call `elche.setup` again and again: nothing of an ended run is kept."""

from __future__ import annotations

import gc
import os

import pytest

import elche
from tests.distributed.cases.tasks import Task, begin, state_of, take_step
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

RUNS = 10


def _after_each_run(policy: str) -> list[tuple[int, float]]:
    """Open files and the model's sum, with nobody looking for circles meanwhile."""
    found = []
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
            total = sum(float(each.double().sum()) for each in state_of(model).values())
            del model, optimizer, loader
            found.append((len(os.listdir("/proc/self/fd")), total))
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.every(2)
def test_runs_leave_no_descriptor_behind(ranks2: RankPool, policy: str) -> None:
    found = ranks2.serve(_after_each_run, policy)
    for runs in found:
        counts = [files for files, _ in runs]
        assert counts[-1] < counts[0] + RUNS // 2, counts  # one a run would be nine
    assert [total for _, total in found[0]] == [total for _, total in found[1]]
