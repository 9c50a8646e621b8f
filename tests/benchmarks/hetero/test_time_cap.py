"""Ranks leave a run of capped time together, whatever their clocks say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.hetero.contender import BenchSpec
from tests.benchmarks.hetero.capped_cases import train_capped
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

SPEC = BenchSpec(kind="elche", model="mlp", samples=96 * 32, out="", max_seconds=0.59)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("policy", "segments"), [("sync", 1), ("sync", 48), ("cadence", 2), ("async", 2)]
)
def test_a_run_ends_for_all_when_the_time_of_one_rank_is_up(
    ranks2: RankPool, tmp_path: Path, policy: str, segments: int
) -> None:
    """The quicker clock counts 0.06 s a batch, and 0.03 a part: it decides."""
    spec = replace(SPEC, out=str(tmp_path), policy=policy, segments=segments)
    results = ranks2.run(train_capped, spec, case_setup=serve_in_thread)
    assert len({result["samples"] for result in results}) == 1
    assert 0 < results[0]["samples"] < SPEC.samples
