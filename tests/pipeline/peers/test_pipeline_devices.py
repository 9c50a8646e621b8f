"""Real processes whose tensors go from device to device train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import Work, furthest, plain
from tests.pipeline.cases.pipeline_device_cases import by_devices

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zb", "zb-v"])
def test_as_one_process(ranks4: RankPool, schedule: str) -> None:
    work = Work(model="gpt", schedule=schedule)
    expected = plain(work)
    found = ranks4.run(by_devices, work, case_setup=serve_in_thread)
    assert furthest(found[0][0].state, expected.state) <= 1e-12
    for trained, (sent,), said in found:
        assert trained.losses == pytest.approx(expected.losses, rel=1e-12)
        assert trained.norm == pytest.approx(expected.norm, rel=1e-12)
        # 4 microbatches, 2 steps forwards and backwards: beyond those of the trial.
        assert sent >= 8
        assert said == ""


def test_where_it_fails_or_is_not_wanted_all_take_the_host(ranks2: RankPool) -> None:
    work = Work()
    expected = plain(work)
    gloo = replace(work, options={"transport": "gloo"})
    for asked, fails, words in (
        (work, True, "NCCL does not serve (rank 0: no such device); tensors pass"),
        (gloo, False, ""),
    ):
        found = ranks2.run(by_devices, asked, fails, case_setup=serve_in_thread)
        assert furthest(found[0][0].state, expected.state) <= 1e-12
        assert found[0][2].startswith(words)
        assert (found[0][2] != "") == fails
        assert not any(map(sum, (sent for _, sent, _ in found)))
