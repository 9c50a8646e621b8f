"""Windows of a run that ranks leave and join: each sample counts as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.cases.weight_cases import BATCH, SAMPLES, weigh
from tests.harness.fenced import run_fenced

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("policy", "founders", "victim", "joiners", "sizes"),
    [
        ("cadence", 3, 1, 1, [3, 2, 3, 3]),
        ("async", 3, 0, 1, [3, 2, 3, 3]),
        ("async", 2, -1, 2, [2, 2, 4, 4]),
        pytest.param("cadence", 3, 1, 0, [3, 2, 2, 2], marks=pytest.mark.slow),
        pytest.param("cadence", 2, 0, 2, [2, 1, 3, 3], marks=pytest.mark.slow),
    ],
)
@pytest.mark.every(2)
def test_each_sample_counts_once_whoever_is_there(
    policy: str,
    founders: int,
    victim: int,
    joiners: int,
    sizes: list[int],
    tmp_path: Path,
) -> None:
    coming = founders + joiners
    outcomes, _ = run_fenced(
        *(coming, weigh, str(tmp_path), policy, founders, victim),
        joiners=joiners,
        env=[{"COMING": str(coming)}] * coming,
    )
    errors = {each.rank: str(each.error) for each in outcomes if each.error}
    assert errors.keys() == {victim} - {-1}, "\n".join(errors.values())
    before = founders
    of_ranks = [outcomes[rank].value for rank in {*range(founders)} - {victim}]
    for size, *found in zip(sizes, *of_ranks, strict=True):
        seen = {samples for _, batches, _ in found for samples in batches}
        # Global batches are cut anew inside the epoch; what is left of one that was
        # begun makes smaller local batches.
        assert BATCH // size in seen
        assert max(seen) == BATCH // min(before, size)
        assert before != size or len(seen) == 1
        assert {ranks for ranks, _, _ in found} == {size}
        for _, _, counted in found:
            assert counted == pytest.approx([1.0] * SAMPLES)
        before = size
