"""Several forwards or backwards of one step: as in one process, or refused."""

from __future__ import annotations

import re

import pytest

from tests.ddp.cases import ddp_pass_cases as cases
from tests.ddp.cases.ddp_cases import meeting
from tests.ddp.test_ddp import same
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

MANY, ONE = cases.TINY_MIB, 25.0


@pytest.mark.parametrize(
    ("case", "cap"),
    [
        ("branches", ONE),
        ("accumulated", MANY),
        ("heads", MANY),
        ("heads", ONE),
        ("heads last", MANY),
        ("hidden heads last", MANY),
        ("captured", ONE),
        ("outlived", ONE),
    ],
)
def test_passes_equal_one_process(ranks2: RankPool, case: str, cap: float) -> None:
    expected = cases.alone(case)
    for found in ranks2.run(cases.passes, case, cap, case_setup=meeting):
        assert not isinstance(found, str), found
        same(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("case", "cap", "says"),
    [
        ("accumulated branches", ONE, "ConfigError: .* call backward.. for each forw"),
        ("other forward", MANY, "ConfigError: .* another forward pass, whose samples"),
        ("accumulated heads", ONE, "ConfigError: .* run one backward for each forward"),
        ("kept", ONE, "ConfigError: a pass of weight . after one of 0 under no_sync"),
        ("hidden", ONE, "ConfigError: .* return tensors, or run backward before"),
        ("broken", MANY, "CommunicationError: .* interrupted on rank [01], or its"),
    ],
)
def test_passes_that_cannot_be_weighed_are_refused(
    ranks2: RankPool, case: str, cap: float, says: str
) -> None:
    for text in ranks2.run(cases.passes, case, cap, case_setup=meeting):
        assert isinstance(text, str)
        assert re.search(says, text), text


def test_a_leap_of_weights_keeps_float16_in_range(ranks2: RankPool) -> None:
    for first, _, last in ranks2.run(cases.beside_float16, case_setup=meeting):
        assert last == pytest.approx(first, rel=1e-4)
