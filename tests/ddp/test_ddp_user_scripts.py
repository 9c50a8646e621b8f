"""Scripts that people have, with the import replaced."""

from __future__ import annotations

import pytest

from tests.ddp.cases import ddp_user_cases as cases
from tests.ddp.cases.ddp_cases import meeting
from tests.ddp.test_ddp import same
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled"))
        for name in cases.SCRIPTS
    ],
)
def test_it_ends_as_with_torchs_wrapper(ranks2: RankPool, script: str) -> None:
    for ours, theirs in ranks2.run(cases.both, script, case_setup=meeting):
        assert ours
        same(ours, theirs, 1e-12)


def test_a_buffer_resized_on_one_rank_is_refused(ranks2: RankPool) -> None:
    for text in ranks2.run(cases.caches_of_other_lengths, case_setup=meeting):
        assert text.startswith("the model has other buffers on rank 1 than on rank 0")


def test_an_empty_batch_counts_nowhere(ranks2: RankPool) -> None:
    for found, expected in ranks2.run(cases.an_empty_batch, case_setup=meeting):
        same(found, expected, 1e-13)


def test_a_copy_trains(ranks2: RankPool) -> None:
    for copied, first in ranks2.run(cases.a_copy_trains, case_setup=meeting):
        same(copied, first, 0.0)
