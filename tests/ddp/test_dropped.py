"""A world of one: what a rank weighs where the loop drops gradients, who is watched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from elche.ddp.group import TorchGroup
from elche.ddp.wrapper import DistributedDataParallel

DROPPED, REDUCED = 4, 20


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loop:
    """A model in a group of one, whose weight is that of what it reduces."""

    def __init__(
        self, model: nn.Module | None = None, *, begins: bool = True, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        self.ddp = DistributedDataParallel(self.model, **options)
        if begins:
            self.backward(1)
            self.model.zero_grad()

    def loss(self, count: int) -> torch.Tensor:
        out: torch.Tensor = self.ddp(torch.ones(count, 3))
        return out.square().mean()

    def backward(self, count: int, factor: float = 1.0, *, local: bool = False) -> None:
        with self.ddp.no_sync() if local else nullcontext():
            (self.loss(count) * factor).backward()

    @property
    def weight(self) -> float:
        """What the last reduction weighed."""
        assert self.ddp.last_reduction is not None
        return sum(self.ddp.last_reduction.weights)


def replace_by_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.zeros_like(parameter.grad)


DROPS: dict[str, Callable[[nn.Module], None]] = {
    "to none": lambda model: model.zero_grad(),
    "to zeros": lambda model: model.zero_grad(set_to_none=False),
    "by an optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "replaced": replace_by_zeros,
}
dropped = pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
as_views = pytest.mark.parametrize("as_views", [False, True])


def _after_backward(loop: Loop, drop: Callable[[nn.Module], None]) -> float:
    for _ in range(2):
        drop(loop.model)
        loop.backward(DROPPED, local=True)
        drop(loop.model)
        loop.backward(REDUCED)
    return REDUCED


def _before_backward(loop: Loop, drop: Callable[[nn.Module], None]) -> float:
    loop.backward(DROPPED, local=True)
    loss = loop.loss(REDUCED)
    drop(loop.model)
    loss.backward()
    return REDUCED


def _before_more(loop: Loop, drop: Callable[[nn.Module], None]) -> float:
    loop.backward(DROPPED, local=True)
    loop.backward(DROPPED, local=True)
    drop(loop.model)
    loop.backward(3, local=True)
    loop.backward(5, local=True)
    loop.backward(REDUCED)
    return 3 + 5 + REDUCED


@dropped
@as_views
@pytest.mark.parametrize("when", [_after_backward, _before_backward, _before_more])
@pytest.mark.every(5)
def test_what_was_dropped_weighs_nothing(
    drop: Callable[[nn.Module], None], as_views: bool, when: Callable[..., float]
) -> None:
    loop = Loop(gradient_as_bucket_view=as_views)
    weight = when(loop, drop)
    assert loop.weight == weight


@dropped
def test_a_gradient_that_comes_before_that_of_the_output(
    drop: Callable[[nn.Module], None],
) -> None:
    """The pass has added to a parameter when it is seen to begin."""
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    loop = Loop(model, begins=False)

    def backward(count: int) -> None:
        out = loop.ddp(torch.ones(count, 3))
        loss = (out * model.scale).square().mean()  # beyond what the forward returns
        drop(model)
        loss.backward()

    backward(1)
    with loop.ddp.no_sync():
        backward(DROPPED)
        backward(5)
    backward(REDUCED)
    assert loop.weight == REDUCED


def test_a_step_without_a_batch_after_a_drop() -> None:
    loop = Loop()
    loop.backward(DROPPED, local=True)
    loop.ddp.join_step()
    assert loop.weight == DROPPED
    loop.backward(DROPPED, local=True)
    loop.model.zero_grad()
    loop.ddp.join_step()
    assert loop.weight == 0


def test_a_forward_that_was_never_backward_after_a_drop() -> None:
    """Its weight is not counted, and what was dropped before it neither."""
    loop = Loop()
    loop.backward(DROPPED, local=True)
    loop.model.zero_grad()
    loop.loss(7)
    loop.backward(REDUCED)
    assert loop.weight == REDUCED


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def edited(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    for parameter in loop.model.parameters():
        parameter.grad = parameter.grad * 2.0  # type: ignore[operator]


KEEPS: dict[str, Callable[[Loop], None]] = {
    "nothing happens": lambda loop: None,
    "gradients are clipped and replaced": edited,
    "some are dropped": lambda loop: loop.model[0].zero_grad(),  # type: ignore[index]
    "a forward has no backward": lambda loop: loop.loss(9) and None,
}


@pytest.mark.parametrize("happens", KEEPS.values(), ids=KEEPS)
@as_views
def test_what_is_kept_weighs(happens: Callable[[Loop], None], as_views: bool) -> None:
    loop = Loop(gradient_as_bucket_view=as_views)
    loop.backward(3, local=True)
    happens(loop)
    loop.backward(5, local=True)
    happens(loop)
    loop.backward(REDUCED)
    assert loop.weight == 3 + 5 + REDUCED


@as_views
def test_a_gradient_that_is_zero_weighs(as_views: bool) -> None:
    """Samples of which nothing is learned are samples."""
    loop = Loop(gradient_as_bucket_view=as_views)
    loop.model[2].weight.register_post_accumulate_grad_hook(halve)  # type: ignore[index]
    loop.backward(3, factor=0.0, local=True)
    loop.backward(5, factor=0.0, local=True)
    loop.backward(REDUCED)
    assert loop.weight == 3 + 5 + REDUCED


def test_processes_are_watched_on_one_host_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process ID means nothing on another host."""
    assert Loop(begins=False).ddp._group.pids == (os.getpid(),)
    monkeypatch.setattr(TorchGroup, "hosts", lambda _: ("here", "there"))
    assert Loop(begins=False).ddp._group.pids == ()
