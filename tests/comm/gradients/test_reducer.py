"""Reduced gradients are those of one process on the union batch, ranks as threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elche.comm.gradients.part_weights import Lost, StepPart
from elche.comm.gradients.reducer import GradientReducer
from tests.comm.gradients.reduced_net import (
    CAPS,
    Gradients,
    Net,
    alone,
    batch_of,
    gradients_of,
    nets,
    trained,
)
from tests.comm.thread_group import ThreadGroup, on_ranks


def reducer_of(model: Net, group: Any, cap_bytes: int) -> GradientReducer:
    return GradientReducer(list(model.parameters()), group, cap_bytes)


def check(ranks: Sequence[Gradients], expected: Gradients) -> None:
    """The same bits on all ranks, and what one process finds."""
    for name, mine, *others in zip(
        dict(Net().named_parameters()), expected, *ranks, strict=True
    ):
        for other in others:
            if mine is None:
                assert other is None, name
                continue
            assert other is not None, name
            assert torch.equal(other, others[0]), name
            torch.testing.assert_close(other, mine, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("shares_host", [True, False], ids=["shared", "collectives"])
@pytest.mark.parametrize("cap_bytes", CAPS.values(), ids=CAPS)
def test_any_shares_give_the_gradient_of_the_union(
    cap_bytes: int, shares_host: bool
) -> None:
    """Shares change, the layer of large parts comes late, a rank has nothing."""
    steps = [(3, 2, 1), (5, 3, 1), (1, 0, 6), (2, 2, 2), (9, 4, 0)]

    def run(group: ThreadGroup, model: Net) -> list[Gradients]:
        reducer = reducer_of(model, group, cap_bytes)
        reducer.attach()
        found = trained(reducer, model, group.rank, steps)
        assert reducer.backward_passes == len(steps)
        return found

    ranks = on_ranks(3, run, nets(3), shares_host=shares_host)
    for step, sizes in enumerate(steps):
        check([found[step] for found in ranks], alone(step, sizes))


@pytest.mark.parametrize("cap_bytes", CAPS.values(), ids=CAPS)
def test_a_group_of_one_keeps_its_gradients(cap_bytes: int) -> None:
    """Without a copy, and rescaled where ranks were lost."""
    steps = [(5,), (1,), (4,)]

    def run(group: ThreadGroup, model: Net) -> list[Gradients]:
        reducer = reducer_of(model, group, cap_bytes)
        reducer.attach()
        found = trained(reducer, model, 0, steps)
        came: list[torch.Tensor | None] = []
        weight = model.body[0].weight
        weight.register_post_accumulate_grad_hook(lambda p: came.append(p.grad))
        reducer.lost = lambda label, number: Lost(0.5, 0.5)
        found += trained(reducer, model, 0, steps[:1])
        assert came[0] is weight.grad
        return found

    (found,) = on_ranks(1, run, nets(1))
    for got, (step, sizes) in zip(found, enumerate(steps), strict=False):
        check([got], alone(step, sizes))
    check([found[-1]], [g if g is None else 2 * g for g in alone(0, (5,))])


@pytest.mark.parametrize("kind", ["means", "sums", "weights"])
def test_a_group_of_one_accumulates_like_plain_pytorch(kind: str) -> None:
    """To the last bit, over held passes and steps; a dropped gradient is released."""

    def run(group: ThreadGroup, model: Net) -> None:
        plain, reducer = Net(), reducer_of(model, group, 300)
        if kind == "sums":
            reducer.weights.sum_losses()
        elif kind == "weights":
            reducer.weights.weigh_by_user()
        reducer.attach()
        for step in range(6):
            if step % 3 == 0:
                before = model.body[0].weight.grad
                held = None if before is None else weakref.ref(before)
                del before
                model.zero_grad()
                plain.zero_grad()
                assert held is None or held() is None
            weight = 3.0 + step if kind == "weights" else None
            reducer.begin_step(StepPart(1.0, 1, weight, label=step))
            for part in range(2):
                reducer.hold(part == 0)
                for each in (model, plain):
                    losses = each.losses(batch_of(part, step, 3 + step % 2))
                    (losses.sum() if kind == "sums" else losses.mean()).backward()
            reducer.end_step()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                if mine.grad is None or other.grad is None:
                    assert mine.grad is other.grad
                else:
                    assert torch.equal(mine.grad, other.grad)
            assert (reducer.backward_passes, reducer.passed) == (step + 1, step)

    on_ranks(1, run, nets(1))


def test_a_rank_without_samples_adds_nothing_where_losses_are_sums() -> None:
    def run(group: ThreadGroup, model: Net) -> Gradients:
        reducer = reducer_of(model, group, 300)
        reducer.weights.sum_losses()
        reducer.attach()
        reducer.begin_step(StepPart(float(group.rank == 0), 1))
        model.losses(batch_of(group.rank, 0, 5)).sum().backward()
        reducer.end_step()
        return gradients_of(model)

    means = alone(0, (5, 5), (1.0, 0.0))
    sums = [None if mean is None else 5 * mean for mean in means]
    check(on_ranks(2, run, nets(2)), sums)


def accumulated(model: Net, reducer: GradientReducer, group: ThreadGroup) -> None:
    """Two steps without zero_grad between them, as gradient accumulation does."""
    for step, sizes in enumerate(ACCUMULATED):
        reducer.begin_step(StepPart(sizes[group.rank] / sum(sizes), 2))
        model.losses(batch_of(group.rank, step, sizes[group.rank])).mean().backward()
        reducer.end_step()


def in_micro_batches(model: Net, reducer: GradientReducer, group: ThreadGroup) -> None:
    """The same two steps, each part cut where a device does not hold it at once."""
    for step, sizes in enumerate(ACCUMULATED):
        mine = sizes[group.rank]
        pieces = batch_of(group.rank, step, mine).split(4)
        reducer.begin_step(StepPart(mine / sum(sizes), 2))
        passes = reducer.backward_passes
        for number, piece in enumerate(pieces):
            reducer.hold(number < len(pieces) - 1)
            (model.losses(piece).sum() / mine).backward()
        assert reducer.backward_passes == passes + 1
        reducer.end_step()


ACCUMULATED = [(12, 4), (4, 8), (8, 8)]


@pytest.mark.parametrize("train", [accumulated, in_micro_batches])
@pytest.mark.parametrize("shares_host", [True, False], ids=["shared", "collectives"])
@pytest.mark.parametrize("cap_bytes", CAPS.values(), ids=CAPS)
def test_what_is_accumulated_counts_once(
    cap_bytes: int,
    shares_host: bool,
    train: Callable[[Net, GradientReducer, ThreadGroup], None],
) -> None:
    def run(group: ThreadGroup, model: Net) -> Gradients:
        reducer = reducer_of(model, group, cap_bytes)
        reducer.attach()
        train(model, reducer, group)
        return gradients_of(model)

    model = Net()
    for step, sizes in enumerate(ACCUMULATED):
        expected = alone(step, sizes, model=model)
    check(on_ranks(2, run, nets(2), shares_host=shares_host), expected)


def test_ranks_weigh_what_the_user_says() -> None:
    """Weights leave the scale of the last step behind, and one rank says nothing."""
    weights = [(3.0, 1.0, 2.0), (700.0, 1.0, 0.5), (0.001, 0.0, 0.002), (2.0, 2.0, 0.0)]
    sizes = (4, 6, 2)

    def run(group: ThreadGroup, model: Net) -> list[Gradients]:
        reducer = reducer_of(model, group, 300)
        reducer.weights.weigh_by_user()
        reducer.attach()
        plan = [sizes] * len(weights)
        return trained(reducer, model, group.rank, plan, weights)

    ranks = on_ranks(3, run, nets(3))
    for step, each in enumerate(weights):
        check([found[step] for found in ranks], alone(step, sizes, each))


class Looped(nn.Module):
    """Defined in another order than used; one layer gets two gradients in a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1)
        self.twice = nn.Linear(4, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.double())
        for _ in range(2):  # a backward pass of its own for each
            x = checkpoint(self.twice, x.tanh(), use_reentrant=True)
        return self.last(x).square().mean()


def _bucket_bytes(reducer: GradientReducer) -> list[int]:
    return [bucket.size_bytes for bucket in reducer.buckets]


def test_buckets_follow_the_order_and_number_of_gradients_that_were_seen() -> None:
    def run(group: Any, model: Looped) -> list[tuple[list[int], Gradients]]:
        reducer = GradientReducer(list(model.parameters()), group, 1)
        reducer.attach()
        found = [(_bucket_bytes(reducer), gradients_of(model))]
        for step in range(2):
            model.zero_grad()
            reducer.begin_step(StepPart(0.5, 2))
            model(batch_of(group.rank, step, 3)).backward()
            reducer.end_step()
            found.append((_bucket_bytes(reducer), gradients_of(model)))
        return found

    ranks = on_ranks(2, run, [Looped(), Looped()])
    for found in ranks:
        sizes = [each for each, _ in found]
        assert sizes[0] == [8 * n for n in (4, 16, 1, 4, 16)]  # the last defined first
        assert sorted(sizes[1][:2]) == [8, 32]  # the last used first
        assert sizes[1][4:] == [8 * 16]
        assert sizes[2] == sizes[1]
    for step in range(2):
        model = Looped()
        for rank in range(2):
            (model(batch_of(rank, step, 3)) / 2).backward()
        for mine, one, other in zip(
            gradients_of(model),
            ranks[0][step + 1][1],
            ranks[1][step + 1][1],
            strict=True,
        ):
            assert mine is not None
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
            torch.testing.assert_close(one, mine, rtol=1e-12, atol=1e-13)
