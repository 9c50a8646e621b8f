"""Scripts that people have, with the import replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ddp.cases import ddp_user_cases as cases
from tests.ddp.cases.ddp_cases import meeting
from tests.ddp.test_ddp import same
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SLOW = ("compiled",)
ALL = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in cases.SCRIPTS
]


@pytest.mark.parametrize("script", ALL)
def test_it_ends_as_with_torchs_wrapper(ranks2: RankPool, script: str) -> None:
    for ours, theirs in ranks2.run(cases.both, script, case_setup=meeting):
        assert ours
        same(ours, theirs, 1e-6 if script == "scaled" else 1e-12)


def test_a_buffer_resized_on_one_rank_is_each_ranks_own(ranks2: RankPool) -> None:
    first, second = ranks2.run(cases.caches_of_other_lengths, case_setup=meeting)
    assert (first.pop("length"), second.pop("length")) == (6, 7)
    same(_but(first, "grown"), _but(second, "grown"), 0.0)


def test_an_empty_batch_counts_nowhere(ranks2: RankPool) -> None:
    for found, expected in ranks2.run(cases.an_empty_batch, case_setup=meeting):
        same(found, expected, 1e-13)


def test_a_copy_trains_once_it_has_a_group(ranks2: RankPool) -> None:
    for copied, first in ranks2.run(cases.a_copy_trains_in_a_group, case_setup=meeting):
        same(copied, first, 0.0)


def test_a_gradient_that_a_hook_takes_is_named(ranks2: RankPool) -> None:
    for text in ranks2.run(cases.taken_gradient, case_setup=meeting):
        assert text.startswith("0.bias: a hook took its gradient away")


@pytest.mark.slow
def test_synchronised_norms_in_a_compiled_model(ranks2: RankPool) -> None:
    for found, eager in ranks2.run(cases.compiled_norms, case_setup=meeting):
        same(found, eager, 1e-12)


def _but(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != name}
