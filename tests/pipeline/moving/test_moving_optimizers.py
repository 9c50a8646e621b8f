"""Parameters leave one optimizer and come to another, with what it keeps for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.errors import ConfigError, MismatchError
from elche.pipeline.moving.moving_optimizers import (
    Moving,
    OptimizerGroups,
    as_optimizers,
    check_alike,
    pack_state,
    unpack_state,
)


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(i))) for i in range(count)]


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    optimizer.step()


def travelled(moving: Moving) -> Moving:
    """As over a wire: plain data and tensors."""
    packed, tensors = pack_state(moving)
    return unpack_state(packed, [one.clone() for one in tensors])


def test_state_goes_with_a_parameter_into_the_group_of_the_same_place() -> None:
    mine, theirs = parameters(3), parameters(3)
    here = torch.optim.AdamW([{"params": mine[:2]}, {"params": mine[2:], "lr": 0.5}])
    there = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.5}]
    )
    stepped(here)
    moving = travelled(OptimizerGroups([here]).leaving("x", mine[2]))
    state = {key: value.clone() for key, value in here.state[mine[2]].items()}
    come = nn.Parameter(mine[2].detach().clone())
    OptimizerGroups([here]).exchange([mine[2]], [], mine[:2])
    OptimizerGroups([there]).exchange([], [(come, moving)], [come, *theirs])
    assert mine[2] not in here.state
    assert here.param_groups[1]["params"] == []
    assert [id(one) for one in there.param_groups[1]["params"]] == [
        id(come),
        id(theirs[2]),
    ], "in the model's order"
    assert there.state[come].keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(there.state[come][key], value)


def test_groups_with_names_of_their_own_are_found_by_name() -> None:
    mine = parameters(2)
    here = torch.optim.SGD(
        [{"params": mine[:1], "name": "a"}, {"params": mine[1:], "name": "b"}]
    )
    there = torch.optim.SGD(
        [{"params": [], "name": "b"}, {"params": [], "name": "a"}], lr=1e-3
    )
    groups = [OptimizerGroups([here]), OptimizerGroups([there])]
    check_alike({0: groups[0].describe(), 1: groups[1].describe()})
    moving = travelled(groups[0].leaving("x", mine[1]))
    groups[1].exchange([], [(mine[1], moving)], mine[1:])
    assert there.param_groups[0]["params"][0] is mine[1]
    assert there.param_groups[1]["params"] == []


def test_names_of_parameters_follow() -> None:
    mine, new = parameters(2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([("first", mine[0]), ("second", mine[1])])
    moving = Moving("third", (0, 0), {})
    OptimizerGroups([optimizer]).exchange([mine[0]], [(new, moving)], [new, mine[1]])
    group = optimizer.param_groups[0]
    assert group["param_names"] == ["third", "second"]
    assert group["params"][0] is new


def test_others_than_the_pipelines_parameters_stay() -> None:
    mine = parameters(3)
    optimizer = torch.optim.SGD(mine, momentum=0.9)
    stepped(optimizer)
    OptimizerGroups([optimizer]).exchange([mine[0]], [], [mine[1]])
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [
        id(mine[2]),
        id(mine[1]),
    ]
    assert set(map(id, optimizer.state)) == {id(mine[1]), id(mine[2])}


def test_several_optimizers() -> None:
    mine = parameters(2)
    both = [torch.optim.SGD(mine[:1], momentum=0.9), torch.optim.AdamW(mine[1:])]
    groups = OptimizerGroups(as_optimizers(both))
    groups.check_holds([("a", mine[0]), ("b", mine[1])], rank=0)
    assert groups.leaving("b", mine[1]).place == (1, 0)
    with pytest.raises(
        ConfigError, match="of rank 3 does not hold b, which learn here"
    ):
        OptimizerGroups(both[:1]).check_holds([("a", mine[0]), ("b", mine[1])], rank=3)


def test_frozen_parameters_need_no_optimizer() -> None:
    mine = parameters(2)
    mine[1].requires_grad_(False)
    groups = OptimizerGroups([torch.optim.SGD(mine[:1])])
    groups.check_holds([("a", mine[0]), ("b", mine[1])], rank=0)
    assert groups.leaving("b", mine[1]) == Moving("b", None, {})


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
    mine = OptimizerGroups([torch.optim.SGD(parameters(1), lr=0.5)])
    theirs = OptimizerGroups(other(parameters(1)))
    with pytest.raises(MismatchError, match=message):
        check_alike({0: mine.describe(), 1: theirs.describe()})


def test_what_is_no_optimizer() -> None:
    assert as_optimizers(()) == ()
    with pytest.raises(ConfigError, match="expected a torch optimizer"):
        as_optimizers([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="LBFGS keeps one state for all"):
        as_optimizers(torch.optim.LBFGS(parameters(1)))
