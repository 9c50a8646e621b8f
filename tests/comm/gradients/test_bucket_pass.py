"""When a pass sums, hands out and lets go, with the other rank written by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket
from elche.comm.gradients.part_weights import StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.transport.exchange import SharedExchange
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError, RankLostError

OTHERS = 10


class HalfGroup:
    """Rank 0 of two; the test plays rank 1 in the memory that they share."""

    rank, world_size, shares_host = 0, 2, True
    host_leaders = None

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """It is rank 0's."""

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 1 gathers rank 0's values, and adds nothing to sums."""
        if len(tensor) == self.world_size and not tensor.is_floating_point():
            tensor[1] = tensor[0]

    def wait_until(self, ready: Callable[[], bool], what: str, missing: Any) -> None:
        assert ready(), (what, missing())


class Collectives(HalfGroup):
    """The same without shared memory: sums are formed in what was sent, at once."""

    shares_host = False

    def all_reduce_async(self, tensor: torch.Tensor) -> Collectives:
        """Rank 1 adds nothing."""
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        """It has ended."""


def reducer(parameters: list[nn.Parameter], group: Any = None) -> GradientReducer:
    """One bucket per parameter; after the first pass in the order of gradients."""
    group = group or HalfGroup()
    made = GradientReducer(parameters, group, 1)
    made.attach()
    return made


def exchanges(made: GradientReducer) -> list[SharedExchange]:
    held: list[Bucket] = made.buckets
    found = [bucket.exchange for bucket in held]
    assert all(isinstance(exchange, SharedExchange) for exchange in found)
    return [exchange for exchange in found if isinstance(exchange, SharedExchange)]


def come(exchange: SharedExchange, messages: int = OTHERS) -> None:
    """Rank 1 has sent, and read, so many messages."""
    exchange._written[1] = exchange._read[1] = messages


@pytest.fixture
def chain() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([float(value)])) for value in (2, 3, 5)]


def loss_of(chain: list[nn.Parameter]) -> torch.Tensor:
    """Gradients appear from the last factor to the first."""
    value = torch.ones(1)
    for parameter in chain:
        value = value * parameter
    return value.sum()


def test_a_message_is_summed_before_the_next_gradient(
    chain: list[nn.Parameter],
) -> None:
    made = reducer(chain)
    first, second, third = exchanges(made)
    for exchange in (first, second, third):
        come(exchange)
    seen: list[list[bool]] = []

    def look(gradient: torch.Tensor) -> None:
        seen.append([e._read[0] == e._number for e in (first, second, third)])

    chain[0].register_hook(look)  # the last gradient is about to be accumulated
    made.begin_step(StepPart(0.5, 2))
    loss_of(chain).backward()
    made.end_step()
    assert seen == [[True, True, True]] or seen == [[True, True, False]]
    assert [p.grad.item() for p in chain if p.grad is not None] == [7.5, 5.0, 3.0]


def test_own_gradients_are_let_go_when_sums_are_handed_out(
    chain: list[nn.Parameter],
) -> None:
    """What was sent of them stays."""
    made = reducer(chain)
    own: list[weakref.ref[torch.Tensor]] = []
    chain[1].register_post_accumulate_grad_hook(
        lambda p: own.append(weakref.ref(p.grad))  # type: ignore[arg-type]
    )
    for _ in range(3):
        for exchange in exchanges(made):
            come(exchange)
        made.begin_step(StepPart(0.5, 2))
        loss_of(chain).backward()
        made.end_step()
        assert own.pop()() is None
        for parameter in chain:
            parameter.grad = None
    sent = [float(each.contribution(0)[0]) for each in exchanges(made)]
    assert sent == [3.0, 5.0, 7.5]


def test_own_gradients_stay_until_a_sum_of_the_next_pass_without_shared_memory(
    chain: list[nn.Parameter],
) -> None:
    """Whoever sends in that pass has had all sums of the last one."""
    made = reducer(chain, Collectives())
    own: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []
    chain[1].register_post_accumulate_grad_hook(
        lambda p: own.append(weakref.ref(p.grad))  # type: ignore[arg-type]
    )
    chain[2].register_hook(lambda gradient: seen.append(own[-1]() is None))
    chain[0].register_hook(lambda gradient: seen.append(own[-2]() is None))
    own.append(weakref.ref(torch.zeros(1)))
    for _ in range(4):
        made.begin_step(StepPart(0.5, 2))
        loss_of(chain).backward()
        made.end_step()
        for parameter in chain:
            parameter.grad = None
    assert seen[4:] == [False, True, False, True]  # the first pass learns the order


@pytest.mark.parametrize("group", [HalfGroup(), Collectives()])
@pytest.mark.parametrize("drops", [True, False])
def test_a_gradient_that_is_kept_stays_as_it_is(
    chain: list[nn.Parameter], drops: bool, group: HalfGroup
) -> None:
    """As in plain training, over any number of steps; one that is not accumulates."""
    made = reducer(chain, group)
    kept: list[torch.Tensor] = []
    values = []
    for _ in range(4):
        made.begin_step(StepPart(1.0, 2))
        for exchange in exchanges(made) if group.shares_host else ():
            come(exchange)
        loss_of(chain).backward()
        made.end_step()
        assert chain[0].grad is not None
        values.append(chain[0].grad.item())
        if drops:
            kept.append(chain[0].grad.detach())
            for parameter in chain:
                parameter.grad = None
    assert values == ([15.0] * 4 if drops else [15.0, 30.0, 45.0, 60.0])
    assert [each.item() for each in kept] == values[: len(kept)]


def test_nothing_is_written_before_all_ranks_have_the_sums(
    chain: list[nn.Parameter],
) -> None:
    made = reducer(chain)
    for _ in range(2):
        made.begin_step(StepPart(1.0, 2))
        for exchange in exchanges(made):
            come(exchange)
        loss_of(chain).backward()
        made.end_step()
    last = exchanges(made)[-1]
    sent = last.contribution(0).tolist()
    last._read[1] = 0  # rank 1 has sent, and not summed
    made.begin_step(StepPart(1.0, 2))
    with pytest.raises(AssertionError, match=r"the reduction of gradients', \[1\]"):
        loss_of([*chain, *chain]).backward()
    assert last.contribution(0).tolist() == sent


def test_work_beneath_runs_once_and_only_in_a_pass_that_is_reduced(
    chain: list[nn.Parameter],
) -> None:
    made = reducer(chain)
    done: list[str] = []
    for exchange in exchanges(made):
        come(exchange)

    def run(*, holds: bool = False) -> None:
        made.begin_step(StepPart(1.0, 2))
        made.hold(holds)
        loss_of(chain).backward()
        made.end_step()
        for exchange in exchanges(made):
            come(exchange)

    made.on_backward = lambda: done.append("a")
    run(holds=True)
    loss_of(chain).backward()  # the user's own
    assert done == []
    run()
    run()
    assert done == ["a"]
    made.on_backward = lambda: done.append("b")
    made.on_backward = None
    run()
    assert done == ["a"]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        reducer([])


def test_a_hook_that_returns_something_is_refused_in_torchs_own_words(
    chain: list[nn.Parameter],
) -> None:
    # Once: a KeyError here, as torch hands on what a hook returns before it refuses it.
    for parameter in chain:
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    made = reducer(chain)
    made.begin_step(StepPart(0.5, 2))
    with pytest.raises(RuntimeError, match="hooks should return None"):
        loss_of(chain).backward()


def test_hooks_go_with_who_set_them(chain: list[nn.Parameter]) -> None:
    for _ in range(2):
        made = reducer(chain)
        assert [len(_hooks_of(parameter)) for parameter in chain] == [1, 1, 1]
        del made
        gc.collect()
        assert [len(_hooks_of(parameter)) for parameter in chain] == [0, 0, 0]


def _hooks_of(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks or {}


class Mortal(HalfGroup):
    """Rank 1 has died: what it has not sent never comes."""

    def wait_until(self, ready: Callable[[], bool], what: str, missing: Any) -> None:
        if not ready():
            raise RankLostError(what)


def test_sums_that_another_rank_has_are_published_and_nothing_is_reduced_anew(
    chain: list[nn.Parameter],
) -> None:
    made = reducer(chain, Mortal())
    died: list[bool] = []

    def go_on() -> None:
        for exchange in exchanges(made):
            come(exchange)
        survivors = Group.alone(1.0)
        made.continue_in(survivors, 0, lambda part: part, lacks=True)
        died.append(True)

    made.on_lost = go_on
    for _ in range(2):
        for exchange in exchanges(made) if made.backward_passes == 0 else ():
            come(exchange)
        for parameter in chain:
            parameter.grad = None
        made.begin_step(StepPart(0.5, 2))
        loss_of(chain).backward()
        made.end_step()
    assert died == [True]
    assert [p.grad.item() for p in chain if p.grad is not None] == [7.5, 5.0, 3.0]
    assert made.backward_passes == made.closed_passes == 2
