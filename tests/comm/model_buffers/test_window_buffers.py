"""Buffers over windows: counters lose nothing, statistics become their mean."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.coordination.protocol.instructions import Reduce
from elche.errors import CommunicationError
from tests.comm.bus import Bus
from tests.comm.plans import plan


class Buffered(nn.Module):
    """A counter, a statistic, a complex one and a mask."""

    count: torch.Tensor
    mean: torch.Tensor
    phase: torch.Tensor
    mask: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([5, 0]))
        self.register_buffer("mean", torch.zeros(2, 2))
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([float("-inf"), float("nan")]))
        self.register_buffer("seen", torch.tensor(False))


COUNT, MEAN, PHASE = 0, 1, 2


def ranks(world_size: int) -> tuple[list[Buffered], list[WindowBuffers]]:
    models = [Buffered() for _ in range(world_size)]
    groups = Bus(world_size).groups()
    return models, [
        WindowBuffers(model, group) for model, group in zip(models, groups, strict=True)
    ]


def begin(held: Sequence[WindowBuffers], active: Sequence[bool]) -> None:
    """What the coordinator does when all ranks have taken."""
    changed = sorted({index for each in held for index in each.changed()})
    for rank, each in enumerate(held):
        count = sum(active)
        weight = 1 / count if active[rank] else 0.0
        reduction = plan(
            rank, weight=weight, active_ranks=count, buffers=tuple(changed)
        )
        each.begin(reduction)


def window(held: Sequence[WindowBuffers], *active: bool) -> None:
    """A window of ranks, some of which have trained; all of them by default."""
    for each in held:
        each.take()
    begin(held, active or [True] * len(held))
    finish(held)


def average(held: WindowBuffers, reduction: Reduce) -> None:
    held.take()
    held.begin(reduction)
    finish([held])


def finish(held: Sequence[WindowBuffers]) -> None:
    """All of them hold the result; nothing is left on its way."""
    for each in held:
        assert each.poll()
        each.wait()
        each.apply()


increments = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.lists(
            st.lists(increments, min_size=size, max_size=size), max_size=5
        )
    )
)
def test_counters_count_every_increment_once(
    windows: list[list[tuple[int, int]]],
) -> None:
    size = len(windows[0]) if windows else 1
    models, held = ranks(size)
    for steps in windows:
        for model, (before, _) in zip(models, steps, strict=True):
            model.count[1] += before
        for each in held:
            each.take()
        begin(held, [True] * size)
        for model, (_, meanwhile) in zip(models, steps, strict=True):
            model.count[1] += meanwhile
        finish(held)
    window(held)
    total = sum(sum(pair) for steps in windows for pair in steps)
    assert [model.count.tolist() for model in models] == [[5, total]] * size


def test_statistics_are_the_mean_of_what_was_taken() -> None:
    models, held = ranks(3)
    mask, seen = models[0].mask.clone(), models[0].seen.clone()
    for rank, model in enumerate(models):
        model.mean.fill_(float(rank + 1))
        model.phase.fill_(complex(rank, 1))
    for each in held:
        each.take()
    begin(held, [True, True, False])
    for model in models:
        model.mean.fill_(100.0)
    finish(held)
    for model in models:
        assert model.mean.tolist() == [[1.5, 1.5], [1.5, 1.5]]
        assert model.phase.tolist() == [0.5 + 1j]
        assert torch.equal(model.mask.nan_to_num(), mask.nan_to_num())
        assert torch.equal(model.seen, seen)


@pytest.mark.parametrize(
    ("set_by", "active", "becomes"),
    [
        ((0,), (True, True, True), False),
        ((0, 2), (True, True, True), True),
        ((0,), (True, True, False), True),
        ((2,), (True, True, False), False),
    ],
)
def test_flags_become_what_most_ranks_have(
    set_by: tuple[int, ...], active: tuple[bool, ...], becomes: bool
) -> None:
    """Of those that trained; a tie raises them. Once they stayed each rank's own."""
    models, held = ranks(3)
    for rank in set_by:
        models[rank].seen.fill_(True)
    window(held, *active)
    assert [bool(model.seen) for model in models] == [becomes] * 3


def test_what_has_travelled_is_sent_before_the_plan_is_there() -> None:
    """Then only what changes for the first time waits for the plan."""
    models, held = ranks(2)
    for number in range(1, 4):
        for rank, model in enumerate(models):
            model.mean.fill_(float(number + rank))
            model.count[1] += 1
            if number == 3:
                model.phase.fill_(complex(rank, number))
        for each in held:
            each.take()
            each.begin_known(is_active=True)
        changed = (COUNT, MEAN, PHASE) if number == 3 else (COUNT, MEAN)
        assert held[0].changed() == changed
        if number == 2:
            assert all(each.poll() for each in held)  # nothing waits for the plan
        begin(held, [True, True])
        finish(held)
        for model in models:
            assert model.mean[0, 0].item() == number + 0.5
            assert model.count.tolist() == [5, 2 * number]
    assert [model.phase.item() for model in models] == [0.5 + 3j, 0.5 + 3j]
    held[0].connect(Bus(2).group(0))
    held[0].take()
    held[0].begin_known(is_active=True)
    assert held[0].poll()  # a rank of another group may know of none


def test_what_nobody_changed_stays_although_it_was_sent() -> None:
    models, held = ranks(2)
    for window in range(2):
        if window == 0:
            models[0].mean.fill_(2.0)
        for each in held:
            each.take()
            each.begin_known(is_active=True)
        if window == 1:
            for model in models:
                model.mean.data.view(-1)[0] = 7.0  # unseen, as a write by another name
        begin(held, [True, True])
        finish(held)
    assert models[0].mean[0, 0].item() == 7.0


def test_only_what_changed_travels() -> None:
    models, held = ranks(2)
    assert [each.changed() for each in held] == [(), ()]
    models[1].mean.fill_(1.0)
    assert [each.changed() for each in held] == [(), (MEAN,)]
    for each in held:
        each.take()
    models[0].phase.fill_(1.0)
    assert [each.changed() for each in held] == [(), (MEAN,)]
    begin(held, [True, True])
    finish(held)
    assert [each.changed() for each in held] == [(PHASE,), ()]
    assert [model.mean[0, 0].item() for model in models] == [0.5, 0.5]


@pytest.mark.parametrize("travelled", [False, True])
def test_after_a_window_that_counts_nowhere_all_is_as_before(travelled: bool) -> None:
    # Once: statistics of rejected batches, which may be no numbers, stayed for good;
    # and before, the mean over no rank was zero, and a running variance with it.
    models, held = ranks(2)
    for model in models:
        model.mean.fill_(3.0)
        model.phase.fill_(complex(1, 2))
    if travelled:
        window(held)
    else:
        for each in held:
            each.rebase()
    models[0].mean.fill_(float("nan"))
    models[1].mean.fill_(5.0)
    models[1].phase.fill_(complex(float("inf"), 0))
    models[1].count[1] += 1
    window(held, False, False)
    for model in models:
        assert model.mean.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert model.phase.tolist() == [1 + 2j]
        assert model.count.tolist() == [5, 0]
    assert [each.changed() for each in held] == [(), ()]


def test_a_large_buffer_is_kept_from_its_first_travel_on() -> None:
    class Large(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(70_000))

    model = Large()
    held = WindowBuffers(model, Bus(1).group(0))
    model.table.fill_(float("nan"))
    average(held, plan(weight=0.0, active_ranks=0, buffers=(0,)))
    assert bool(model.table.isnan().all())
    assert held.changed() == (0,)
    for value, weight, expected in [(1.0, 1.0, 1.0), (float("inf"), 0.0, 1.0)]:
        model.table.fill_(value)
        average(held, plan(weight=weight, active_ranks=int(weight), buffers=(0,)))
        assert model.table[0].item() == expected
        assert held.changed() == ()


def test_a_failed_reduction_is_redone_in_another_group() -> None:
    models, held = ranks(2)
    for rank, model in enumerate(models):
        model.mean.fill_(float(rank + 1))
        model.count[0] += 1
    held[0].take()
    held[0].begin(plan(buffers=(COUNT, MEAN)))
    assert not held[0].poll()
    with pytest.raises(CommunicationError, match="averaging buffers failed on rank 0"):
        held[0].wait()
    assert models[0].mean[0, 0].item() == 1.0
    models[0].mean.fill_(50.0)
    held[0].connect(Bus(1).group(0))
    held[0].begin(plan(weight=1.0, active_ranks=1, buffers=(COUNT, MEAN)))
    finish(held[:1])
    assert models[0].mean[0, 0].item() == 1.0
    assert models[0].count[0].item() == 6


def test_a_buffer_that_is_resized_is_each_ranks_own() -> None:
    models, held = ranks(2)
    for turn in (1.0, 2.0):
        for rank, model in enumerate(models):
            model.mean += turn * (1 + rank)
            model.phase += turn
        if turn == 2.0:  # it has travelled before
            models[1].register_buffer("mean", torch.full((3, 2), 7.0))
        window(held)
    assert torch.equal(models[0].mean, torch.full((2, 2), 3.5))  # its own
    assert torch.equal(models[1].mean, torch.full((3, 2), 7.0))
    assert all(torch.equal(model.phase, models[0].phase) for model in models)
    models[0].mean += 1.0
    assert held[0].changed() == ()
