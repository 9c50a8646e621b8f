"""Observer of a loop: optimizers of its model, each batch's steps, state that stays."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import elche
from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.gradients.buckets.bucket_queue import Reduced
from elche.comm.transport.process_group import Group
from elche.config import RunConfig
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.training import Training
from elche.runtime.watch.observer import LoopObserver
from elche.runtime.watch.rate_watch import follows_progress
from tests.comm.plans import plan


class Loop:
    """Two optimizers over a model's layers, and an observer that knows of the first."""

    def __init__(self, *layers: nn.Module) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), *layers)
        self.first = torch.optim.AdamW(self.model[0].parameters())
        self.second = torch.optim.Adafactor(self.model[1].parameters())
        self.known = AveragedModel(self.model)
        training = Training(
            config=RunConfig(policy="sync"),
            model=self.model,
            optimizers=[self.first],
            loader=DataLoader([torch.ones(3)]),  # type: ignore[arg-type]
            copies=[self.known],
        )
        self.observer = LoopObserver(training, RunNotifications(0))
        self.sync = cast(
            Any,
            SimpleNamespace(
                reducer=SimpleNamespace(backward_passes=1),
                reduced=Reduced(),
                windows=None,
                own_ids=set(),
                parameters=[],
            ),
        )
        self.observer.attach(self.sync)
        self.begin_epoch()

    def begin_epoch(self, *, is_counted: bool = True) -> None:
        self.observer.schedulers.begin_epoch(0, self.observer.optimizers())
        self.observer.begin_part(self.sync, is_counted=is_counted)

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
    parameters, optimizers = list(loop.model.parameters()), loop.observer.optimizers
    sync = ParameterAverager(parameters, loop.model, optimizers, Group.alone(1.0))
    sync.build()
    loop.observer.guard.synchroniser = None  # it would refuse what was not reduced
    loop.model(torch.ones(4, 3)).sum().backward()
    for parameter in loop.model[1].parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    for each in (loop.first, loop.second):
        each.step()
    assert loop.second.state
    assert not sync.close(begins=False)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    sync.reduce(plan(weight=0.0))
    assert not loop.first.state
    assert not loop.second.state


def test_a_plain_loop_has_no_state_that_stays(loop: Loop) -> None:
    loop.first.step()
    assert loop.observer.uncarried() == ""
    loop.begin_epoch(is_counted=False)
    assert "may count steps" in loop.observer.uncarried()
    assert loop.observer.barred() == "", "it counts from there on"
    loop.begin_epoch()
    assert loop.observer.uncarried() == ""
    loop.observer.meets("elche.barrier()")
    assert "elche.barrier()" in loop.observer.uncarried()


def test_a_scheduler_is_named_unless_it_was_handed_over(loop: Loop) -> None:
    scheduler = MultiStepLR(loop.first, [1, 30])
    loop.first.step()
    assert "know of the learning rate scheduler" in loop.observer.barred()
    loop.observer.schedulers.end_epoch(has_ended=True)
    loop.observer.schedulers.add(scheduler)
    loop.first.step()
    scheduler.step()
    assert loop.observer.uncarried() == ""
    assert loop.observer.carried_schedulers == [scheduler]
    scheduler.of_its_own = {1: 2}  # type: ignore[attr-defined]  # not to be carried
    assert "scheduler" in loop.observer.uncarried()


def test_a_rate_that_moves_inside_an_epoch_is_named_for_good(loop: Loop) -> None:
    loop.first.param_groups[0]["lr"] = 0.05
    loop.begin_epoch()
    assert loop.observer.uncarried() == "", "between epochs it may"
    loop.first.param_groups[0]["lr"] = 0.01
    assert "changes inside an epoch" in loop.observer.uncarried()
    loop.begin_epoch()
    assert "changes inside an epoch" in loop.observer.uncarried()


def test_a_rate_may_move_with_the_runs_progress(loop: Loop) -> None:
    follows_progress(loop.first)
    loop.first.param_groups[0]["lr"] = 0.01
    assert loop.observer.uncarried() == ""


def test_a_grad_scaler_is_named(loop: Loop) -> None:
    loop.observer.scaler.has_scaler = True
    assert "GradScaler" in loop.observer.uncarried()


def test_sync_batchnorm_is_named() -> None:
    loop = Loop(elche.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2))))
    assert "SyncBatchNorm" in loop.observer.uncarried()
    loop.observer.detach()


def test_a_process_group_of_torch_is_named(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "process group" in loop.observer.uncarried()


def test_an_average_inside_an_epoch_is_named_if_not_handed_over(loop: Loop) -> None:
    other = AveragedModel(loop.model)
    other.update_parameters(loop.model)  # between epochs all ranks do it alike
    loop.observer.copies.is_in_steps = True
    loop.known.update_parameters(loop.model)
    assert loop.observer.uncarried() == ""
    other.update_parameters(loop.model)
    assert "AveragedModel" in loop.observer.uncarried()
    assert int(other.n_averaged) == 2
