"""What is trained may change between epochs, not inside one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import elche
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    begin,
    build,
    error_of,
    identical,
    state_of,
    take_step,
)
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def _train(policy: str, change: str) -> dict[str, torch.Tensor]:
    """Two epochs, with something changed between them, or inside the first.

    Where nothing else is said, the first layer is frozen and then freed.
    """
    model, optimizer, loader = build(Task(samples=64, batch_size=8))
    first: Any = model.get_submodule("0")
    first.requires_grad_("one rank" in change or change == "new head")
    before = first.weight.detach().clone()
    model, optimizer, loader = elche.setup(model, optimizer, loader, policy=policy)
    for epoch in range(2):
        for number, (x, y, _, _) in enumerate(loader):
            if change == "inside" and number == 1:
                first.requires_grad_(True)
            take_step(model, optimizer, x, y)
        if epoch == 0:
            assert torch.equal(first.weight, before) != first.weight.requires_grad
            if change == "new head":  # drawn differently on every rank
                head = torch.nn.Linear(32, 3)
                model.register_module("2", head)
                optimizer.add_param_group({"params": list(head.parameters())})
            elif change == "loaded on one rank" and elche.is_main_process():
                first.weight.data.zero_()
            else:
                frozen = change == "frozen on one rank" and elche.is_main_process()
                first.requires_grad_(not frozen)
    assert not torch.equal(first.weight, before)
    elche.shutdown()
    return state_of(model)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("change", ["between", "new head"])
def test_what_is_trained_changes_between_epochs(
    ranks2: RankPool, change: str, policy: str
) -> None:
    assert identical(ranks2.serve(_train, policy, change))


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("inside", "inside an epoch; do it between epochs"),
        ("frozen on one rank", "does not train what rank 0 trains"),
        ("loaded on one rank", "hold different"),
    ],
)
def test_other_changes_are_refused(
    ranks2: RankPool, change: str, says: str, policy: str
) -> None:
    texts = ranks2.serve(error_of, _train, policy, change)
    assert all(says in text for text in texts)


def _carried(options: dict[str, Any]) -> tuple[int, int, int]:
    """Elements in this rank's messages; trained ones, and their tensors."""
    model, *_ = begin(Task(samples=64, batch_size=8, model="frozen"), **options)
    run = current_run()
    assert run is not None
    held: Any = run._synchroniser.windows or run._synchroniser.reducer
    if options.get("update") == "gradients":
        messages = [held._window._message]
    else:
        is_sync = options["policy"] == "sync"
        parts = held.buckets if is_sync else held._groups
        messages = [part.exchange for part in parts]
    numel = sum(message.contribution(0).numel() for message in messages)
    elche.shutdown()
    trained = [p for p in model.parameters() if p.requires_grad]
    return numel, sum(p.numel() for p in trained), len(trained)


@pytest.mark.parametrize(
    ("options", "flags", "others"),
    [
        ({"policy": "sync"}, True, 0),
        ({"policy": "cadence"}, False, 1),
        ({"policy": "async"}, False, 1),
        ({"policy": "cadence", "update": "gradients"}, True, 1),
    ],
    ids=str,
)
def test_nothing_frozen_travels(
    ranks2: RankPool, options: dict[str, Any], flags: bool, others: int
) -> None:
    """What is trained, a flag for each tensor of gradients, and a weight."""
    for numel, trained, count in ranks2.serve(_carried, options):
        assert numel == trained + flags * count + others


def _sent_and_held(policy: str) -> tuple[int, list[int]]:
    """Frozen and freed in turn: messages of the first epoch, and how many of all that
    were sent until then are held when a later epoch begins."""
    task = Task(samples=64, batch_size=8)
    model, optimizer, loader = begin(task, policy=policy, codec="int8")
    first: Any = model.get_submodule("0")
    sent: list[Any] = []
    held: list[int] = []
    for _ in range(4):
        is_first = True
        for x, y, _, _ in loader:
            if is_first:
                gc.collect()
                held.append(sum(memory() is not None for memory in sent))
            is_first = False
            take_step(model, optimizer, x, y)
        run = current_run()
        assert run is not None
        sent += map(weakref.ref, run.worker.group.transfers.values())
        first.requires_grad_(not first.weight.requires_grad)
    elche.shutdown()
    return len(sent), held


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_what_was_sent_before_a_rebuild_is_let_go(
    ranks2: RankPool, policy: str
) -> None:
    found = ranks2.serve(_sent_and_held, policy)
    assert all(sent > 0 for sent, _ in found)
    # A rank that is late on a busy machine may find an epoch done by the other one.
    assert all(held and not any(held) for _, held in found)
