"""Observer of a loop: the optimizers that step its model, and what each batch steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elche.config import RunConfig
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.training import Training
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.windows.parameter_sync import LocalSteps


class Loop:
    """Two optimizers over a model's layers, and an observer that knows of the first."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        self.first = torch.optim.AdamW(self.model[0].parameters())
        self.second = torch.optim.Adafactor(self.model[1].parameters())
        training = Training(
            config=RunConfig(policy="sync"),
            model=self.model,
            optimizers=[self.first],
            loader=DataLoader([torch.ones(3)]),  # type: ignore[arg-type]
        )
        self.observer = LoopObserver(training, RunNotifications(0))
        reducer = SimpleNamespace(backward_passes=1)
        self.observer.guard.synchroniser = cast(Any, SimpleNamespace(reducer=reducer))
        self.observer.attach()

    def begin_batch(self) -> None:
        self.observer.begin_batch([torch.ones(4, 3)], 4)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.observer.detach()


def test_optimizers_are_known_once_they_step_the_model(loop: Loop) -> None:
    assert loop.observer.optimizers() == [loop.first]
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # of another model
    loop.second.step()
    assert loop.observer.optimizers() == [loop.first, loop.second]
    loop.second = torch.optim.Adafactor(
        loop.model[1].parameters()
    )  # the old one is gone
    assert loop.observer.optimizers() == [loop.first]
    loop.observer.detach()
    loop.observer.detach()
    loop.second.step()  # after the run
    assert loop.observer.optimizers() == [loop.first]


def test_nobody_joins_steps_that_do_not_come_after_every_batch(loop: Loop) -> None:
    observer = loop.observer
    loop.first.step()
    assert observer.barred() == ""
    loop.begin_batch()
    assert "step of every optimizer" in observer.barred()
    loop.first.step()
    assert observer.barred() == ""
    loop.begin_batch()
    loop.begin_batch()
    loop.first.step()
    assert "step of every optimizer" in observer.barred(), "for good"


def test_a_lost_update_takes_all_optimizers_back(loop: Loop) -> None:
    steps = LocalSteps(loop.model, loop.observer.optimizers)
    loop.model(torch.ones(4, 3)).sum().backward()
    for parameter in loop.model[1].parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    for each in (loop.first, loop.second):
        each.step()
    assert loop.second.state
    steps.forget_states()
    assert not loop.first.state
    assert not loop.second.state
