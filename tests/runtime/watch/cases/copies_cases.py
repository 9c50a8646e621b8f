"""Loops that keep averages of the model's weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elche
from elche.runtime.watch import model_copies
from tests.distributed.cases.tasks import Task, build
from tests.harness.settings import nested

DECAY = 0.9
FIRST_SEEN = 3
"""Batches of rank 1 before it updates the copies for the first time."""

State = dict[str, torch.Tensor]
Commit = tuple[tuple[int, ...], list[torch.Tensor]]


@dataclass
class Kept:
    """What a rank holds at the end, the commits, and its own copy before the mean."""

    ema: State = field(default_factory=dict)
    swa: State = field(default_factory=dict)
    by_hand: State = field(default_factory=dict)
    own: State = field(default_factory=dict)
    model: State = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    is_patched: bool = False


class ByHand(nn.Module):
    """An average that the loop itself writes, and how often it did."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("count", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step of an EMA."""
        for mine, other in zip(
            self.module.parameters(), model.parameters(), strict=True
        ):
            mine.lerp_(other, 1.0 - DECAY)
        self.count += 1


def keep_copies(task: Task) -> Kept:
    """An EMA after each batch, SWA after every other one, and one by hand."""
    kept, rank = Kept(), int(os.environ["RANK"])
    model, optimizer, loader = build(task)
    ema = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    )
    swa, by_hand = AveragedModel(model), ByHand(model)
    original = AveragedModel.update_parameters
    committed = model_copies.ModelCopies.committed
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, copies=[by_hand], **nested(task.options)
    )
    kept.is_patched = AveragedModel.update_parameters is not original

    def record(
        copies: model_copies.ModelCopies,
        samples: Sequence[int],
        common: Callable[[], Mapping[int, torch.Tensor]],
    ) -> None:
        held = common()
        values = [held.get(id(p), p).detach().clone() for p in model.parameters()]
        kept.commits.append((tuple(samples), values))
        committed(copies, samples, common)

    setattr(model_copies.ModelCopies, "committed", record)  # noqa: B010
    try:
        step = 0
        for _ in range(task.epochs):
            for x, y, *_ in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if rank == 0 or step > FIRST_SEEN:
                    ema.update_parameters(model)
                    if step % 2 == 0:
                        swa.update_parameters(model)
                by_hand.update(model)
                kept.own = _state(by_hand)
    finally:
        setattr(model_copies.ModelCopies, "committed", committed)  # noqa: B010
    elche.shutdown()
    assert AveragedModel.update_parameters is original
    kept.ema, kept.swa, kept.by_hand = map(_state, (ema, swa, by_hand))
    kept.model = _state(model)
    return kept


def _state(module: nn.Module) -> State:
    state: dict[str, Any] = module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}
