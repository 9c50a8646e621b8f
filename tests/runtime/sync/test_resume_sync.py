"""Steps of one rank, and after one has trained alone: who may go on, and from what."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import elche
from elche.coordination.protocol.instructions import LeaveOut
from elche.errors import ConfigError
from elche.runtime.sync.resume_sync import broadcast_from, rates
from elche.runtime.sync.step_account import Step
from elche.runtime.sync.step_groups import StepGroups
from tests.comm.thread_group import on_ranks


def made(lr: float = 0.1, *, seed: int = 0, steps: int = 0) -> Any:
    """A model and its optimizer, which has taken so many steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_equal_settings_are_alike_whatever_was_trained() -> None:
    _, one = made()
    _, other = made(seed=5, steps=3)
    _, faster = made(lr=0.2)
    assert rates([one], 0) == rates([other], 1)
    assert rates([one], 0) != rates([faster], 1)


def test_a_rate_that_follows_progress_is_alike_and_a_scheduler_of_torch_is_not() -> (
    None
):
    texts = []
    for rank in range(2):
        _, optimizer = made()
        elche.ProgressLR(optimizer, lambda progress: 1.0 - progress, 100)
        optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
        texts.append(rates([optimizer], rank))
    assert texts[0] == texts[1]
    scheduled = []
    for rank in range(2):
        _, optimizer = made()
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
        scheduled.append(rates([optimizer], rank))
        texts.append(rates([optimizer], rank, followed=[optimizer]))
    assert scheduled[0] != scheduled[1]
    assert texts[2] == texts[3]


def _taken_over(group: Any, job: tuple[float, int]) -> tuple[Any, Any, float]:
    lr, steps = job
    model, optimizer = made(lr, seed=steps, steps=steps)
    optimizer.param_groups[0]["betas"] = (lr, 0.99)  # as OneCycleLR moves them
    broadcast_from(group, model, [optimizer], 1)
    (held,) = optimizer.param_groups
    assert held["betas"] == (held["lr"], 0.99)
    state = [
        value.clone()
        for parameter in model.parameters()
        for value in optimizer.state[parameter].values()
    ]
    values = [value.clone() for value in model.state_dict().values()]
    return values, state, optimizer.param_groups[0]["lr"]


def test_all_hold_what_the_one_held() -> None:
    found = on_ranks(2, _taken_over, [(0.1, 2), (0.3, 4)])
    for values, state, lr in found:
        assert lr == 0.3
        assert all(map(torch.equal, values, found[1][0]))
        assert all(map(torch.equal, state, found[1][1]))
        assert state[0].item() == 4.0  # AdamW's count of steps


class Counting(torch.optim.SGD):
    """Counts its steps in plain numbers, as optimizers of other libraries do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state.update(scale=0.5 ** state["steps"], name="x", nothing=None)


def _counts_taken_over(group: Any, steps: int) -> list[dict[str, Any]]:
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    broadcast_from(group, model, [optimizer], 1)
    keys = ("steps", "scale", "name", "nothing")
    return [{key: s[key] for key in keys} for s in optimizer.state.values()]


def test_plain_numbers_in_the_state_are_the_ones_of_who_trained() -> None:
    expected = {"steps": 3, "scale": 0.125, "name": "x", "nothing": None}
    for steps in (0, 1):
        for found in on_ranks(2, _counts_taken_over, [steps, 3]):
            assert found == [expected, expected]


def test_state_that_a_rank_has_not_is_made() -> None:
    found = on_ranks(2, _taken_over, [(0.1, 0), (0.1, 2)])
    for _, state, _ in found:
        assert len(state) == 4 * 3  # AdamW's of four parameters
        assert all(map(torch.equal, state, found[1][1]))


class Keeping(Counting):
    """Keeps an object that no other rank can read."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["kept"] = Counting


def _object_taken_over(group: Any, kind: type[Counting]) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    broadcast_from(group, model, [optimizer], 1)


def test_state_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"numbers, texts and tensors"):
        on_ranks(2, _object_taken_over, [Keeping, Keeping])


def _with_cache(group: Any, length: int) -> tuple[Any, list[int]]:
    """A model whose cache has its own length, and a buffer on rank 0 alone."""
    model, optimizer = made(seed=length)
    model.register_buffer("cache", torch.full((length,), float(group.rank)))
    if group.rank == 0:
        model.register_buffer("late", torch.ones(2))
    else:
        model[1].running_var = model[1].running_var.double()
    model[1].running_mean.fill_(float(group.rank))
    broadcast_from(group, model, [optimizer], 1)
    return model, model.cache.tolist()


def test_a_cache_that_has_grown_stays_each_ranks_own() -> None:
    found = on_ranks(2, _with_cache, [3, 5])
    (first, _), (second, _) = found
    assert [cache for _, cache in found] == [[0.0] * 3, [1.0] * 5]
    assert first.late.tolist() == [1.0, 1.0]
    assert torch.equal(first[0].weight, second[0].weight)
    for model in (first, second):
        assert model[1].running_mean.tolist() == [1.0] * 4
    assert first[1].running_var.dtype == torch.float32
    assert torch.equal(first[1].running_var.double(), second[1].running_var)


class Own(nn.Parameter):
    """A parameter of a class of the script's own."""


def _own_parameter(group: Any, value: float) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    model.weight = Own(torch.full((1, 1), value))
    broadcast_from(group, model, [], 1)
    return model.weight.flatten().tolist()


def test_parameters_may_be_of_a_class_of_their_own() -> None:
    assert on_ranks(2, _own_parameter, [1.0, 2.0]) == [[2.0], [2.0]]


@pytest.mark.parametrize(("number", "part"), [(2, 0.0), (3, 0.5), (4, 0.5)])
def test_a_rank_is_missing_after_the_last_pass_that_it_has_come_to(
    number: int, part: float
) -> None:
    lost = Step(7, 3, (3, 4, 1, 0)).lost(number, gone={1: 2})
    assert lost.samples == part
    assert lost.ranks == pytest.approx(part * 2 / 3)


def test_ranks_that_were_left_out_are_met_again_after_a_death() -> None:
    worker = Mock(place=1, members=[0, 1, 2])
    groups = StepGroups(Mock(), Mock(), Mock(worker=worker))
    groups.exclude(LeaveOut(rank=1, epoch=0, left_out=(2,), reason=""))
    groups.is_apart = True
    with pytest.raises(ConfigError, match=r"ranks \[2\] are excluded from steps"):
        groups.meet("elche.any")
    groups.take_back(rebuilds=False)
    groups.meet("elche.any")
