"""Optimizers over a pipeline: which are taken, and what ranks must agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.optimizers import as_optimizers, check_alike, describe, keyed


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
    check_alike({0: describe([here]), 1: describe([there])})
    assert [key for key, _ in keyed(there)] == ["b", "a"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda p: [torch.optim.Adam(p)], r"\['SGD'\], rank 1 \['Adam'\]"),
        (lambda p: [], r"\['SGD'\], rank 1 \[\]"),
        (lambda p: [torch.optim.SGD(p, lr=2.0)], "has lr 0.5 on rank 0 and 2.0 on ra"),
        (
            lambda p: [torch.optim.SGD([{"params": p}, {"params": []}], lr=0.5)],
            r"are \[0\] on rank 0 and \[0, 1\] on rank 1",
        ),
    ],
)
def test_ranks_must_have_the_same_optimizers(other: Any, message: str) -> None:
    mine = describe([torch.optim.SGD(parameters(1), lr=0.5)])
    with pytest.raises(MismatchError, match=message):
        check_alike({0: mine, 1: describe(other(parameters(1)))})


def test_what_is_no_optimizer() -> None:
    assert as_optimizers(()) == ()
    with pytest.raises(ConfigError, match="expected a torch optimizer"):
        as_optimizers([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="LBFGS keeps one state for all"):
        as_optimizers(torch.optim.LBFGS(parameters(1)))
