"""The first copy of a model over real processes and gloo."""

from __future__ import annotations

import pytest
import torch

from tests.comm.averaging.cases.overlap_cases import meeting
from tests.comm.tensors.cases.equal_cases import made_equal
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def test_nothing_travels_where_all_hold_the_same(ranks3: RankPool) -> None:
    for sent_bytes, (weight, scale) in ranks3.run(made_equal, None, case_setup=meeting):
        assert sent_bytes == 0
        assert torch.equal(weight, torch.arange(1000.0).reshape(20, 50).t())
        assert scale.item() == 0.5


@pytest.mark.parametrize("changed_rank", [0, 2])
def test_what_differs_in_a_bit_is_rank_0s_afterwards(
    ranks3: RankPool, changed_rank: int
) -> None:
    found = ranks3.run(made_equal, changed_rank, case_setup=meeting)
    expected = torch.tensor(0.5)
    if changed_rank == 0:
        expected.view(torch.int32).bitwise_xor_(1)
    for sent_bytes, (_, scale) in found:
        assert sent_bytes == 4  # the other tensor is equal
        assert torch.equal(scale, expected)
