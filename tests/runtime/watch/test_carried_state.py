"""State that keeps every rank in the steps of `sync`, because it cannot be carried."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import elche
from elche.coordination.accounts.step_count import StepCount
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.carried_state import CarriedState
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.rate_watch import follows_progress
from elche.runtime.watch.scaler_watch import ScalerWatch


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a watch attaches is taken off at the end."""
    update = AveragedModel.update_parameters
    monkeypatch.setattr(AveragedModel, "update_parameters", update)


class Loop:
    """What a rank trains with, and the state that is looked for."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = nn.Linear(2, 2) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = ScalerWatch(self.optimizer, ScalarLog())
        self.known = AveragedModel(self.model)
        self.copies = ModelCopies(self.model, [self.known])
        self.schedulers = FollowedSchedulers("sync", float, StepCount())
        self.state = CarriedState(
            self.model,
            lambda: [self.optimizer],
            self.scaler,
            self.copies,
            self.schedulers,
        )
        self.state.begin_epoch(is_counted=True)

    def move_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.05


def test_a_plain_loop_has_none() -> None:
    loop = Loop(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    loop.optimizer.step()
    assert loop.state.unknown() == ""
    loop.state.begin_epoch(is_counted=False)
    assert "may count steps" in loop.state.unknown()
    loop.state.begin_epoch(is_counted=True)
    assert loop.state.unknown() == ""
    loop.state.meets("elche.barrier()")
    assert "elche.barrier()" in loop.state.unknown()


def test_a_scheduler_is_named_unless_it_was_handed_over() -> None:
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [1, 30])
    assert "scheduler" in loop.state.unknown()
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [1, 30])
    loop.schedulers.add(scheduler)
    loop.optimizer.step()
    scheduler.step()
    assert loop.state.unknown() == ""
    assert loop.state.carried_schedulers == [scheduler]
    scheduler.of_its_own = {1: 2}  # type: ignore[attr-defined]  # not to be carried
    assert "scheduler" in loop.state.unknown()


def test_a_rate_that_moves_inside_an_epoch_is_named_for_good() -> None:
    loop = Loop()
    loop.move_rate()
    assert "moves inside an epoch" in loop.state.unknown()
    loop.state.begin_epoch(is_counted=True)
    assert "moves inside an epoch" in loop.state.unknown()


def test_a_rate_may_move_between_epochs_and_with_the_runs_progress() -> None:
    loop = Loop()
    loop.move_rate()
    loop.state.begin_epoch(is_counted=True)
    assert loop.state.unknown() == ""
    follows_progress(loop.optimizer)
    loop.optimizer.param_groups[0]["lr"] = 0.01
    assert loop.state.unknown() == ""


def test_a_grad_scaler_is_named() -> None:
    loop = Loop()
    loop.scaler.has_scaler = True
    assert "GradScaler" in loop.state.unknown()


def test_sync_batchnorm_is_named() -> None:
    norms = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loop = Loop(elche.convert_sync_batchnorm(norms))
    assert "SyncBatchNorm" in loop.state.unknown()


def test_a_process_group_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "process group" in Loop().state.unknown()


def test_an_average_of_weights_inside_an_epoch_is_named_if_not_handed_over() -> None:
    loop = Loop()
    other = AveragedModel(loop.model)
    other.update_parameters(loop.model)  # between epochs all ranks do it alike
    loop.copies.is_in_steps = True
    loop.known.update_parameters(loop.model)
    assert loop.state.unknown() == ""
    other.update_parameters(loop.model)
    assert "AveragedModel" in loop.state.unknown()
    assert int(other.n_averaged) == 2
