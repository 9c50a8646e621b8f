"""Optimizers over a pipeline: which are taken, and what ranks must agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.checkpoints.named_states import (
    as_optimizers,
    check_alike,
    describe,
    keyed,
)


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(i))) for i in range(count)]


def test_groups_with_names_of_their_own_are_found_by_name() -> None:
    mine = parameters(2)
    here = torch.optim.SGD(
        [{"params": mine[:1], "name": "a"}, {"params": mine[1:], "name": "b"}]
    )
    there = torch.optim.SGD(
        [{"params": [], "name": "b"}, {"params": [], "name": "a"}], lr=1e-3
    )
    check_alike([describe([here]), describe([there])])
    assert [key for key, _ in keyed(there.param_groups)] == ["b", "a"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda p: [torch.optim.Adam(p)], r"\['SGD'\], rank 1 has \['Adam'\]"),
        (lambda p: [], r"\['SGD'\], rank 1 has \[\]"),
        (
            lambda p: [torch.optim.SGD(p, lr=2.0)],
            r"lr of group 0 of optimizer 0 \(SGD\): rank 0 has 0.5, rank 1 has 2.0",
        ),
        (
            lambda p: [torch.optim.SGD([{"params": p}, {"params": []}], lr=0.5)],
            r"rank 0 has \[0\], rank 1 has \[0, 1\]",
        ),
    ],
)
def test_ranks_must_have_the_same_optimizers(other: Any, message: str) -> None:
    mine = describe([torch.optim.SGD(parameters(1), lr=0.5)])
    with pytest.raises(MismatchError, match=message):
        check_alike([mine, describe(other(parameters(1)))])


def test_what_is_no_optimizer() -> None:
    assert as_optimizers(()) == ()
    with pytest.raises(ConfigError, match="expected a torch optimizer"):
        as_optimizers([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="LBFGS keeps one state for all"):
        as_optimizers(torch.optim.LBFGS(parameters(1)))
