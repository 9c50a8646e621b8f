"""Steps that a GradScaler skips are told, and nothing else is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from elche.runtime.scalars import ScalarLog
from elche.runtime.scaler_skips import AMP_FLAG, NAME, ScalerSkips

BAD = (False, True, False, False, True, True)


def train(
    optimizer: torch.optim.Optimizer, model: nn.Module, skips: ScalerSkips | None
) -> list[torch.Tensor]:
    """A loop whose gradients overflow now and then; the weights after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = []
    for is_bad in BAD:
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if is_bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(next(model.parameters()).detach().clone())
        if skips is not None:
            skips.settle()
    return weights


def made(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settles", [False, True])
def test_skipped_steps_are_counted(fused: bool, settles: bool) -> None:
    model, optimizer = made(fused=fused)
    before, log = vars(optimizer).get(AMP_FLAG), ScalarLog()
    skips = ScalerSkips(optimizer, log)
    skips.attach()
    skips.attach()
    weights = train(optimizer, model, skips if settles else None)
    skips.settle()
    assert log.drain(final=True) == ((NAME, 3.0, 6.0),)
    skips.detach()
    skips.detach()
    assert vars(optimizer).get(AMP_FLAG) is before
    other, alone = made(fused=fused)
    expected = train(alone, other, None)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    assert log.drain(final=True) == ()


def test_without_a_scaler_nothing_is_logged() -> None:
    model, optimizer = made(fused=True)
    log = ScalarLog()
    skips = ScalerSkips(optimizer, log)
    skips.attach()
    model(torch.ones(1, 2)).sum().backward()
    assert bool(getattr(optimizer, AMP_FLAG))  # as frameworks ask, without a step
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    skips.settle()
    assert log.drain(final=True) == ()


def test_an_optimizer_can_be_copied_while_it_is_watched() -> None:
    _, optimizer = made(fused=True)
    log = ScalarLog()
    skips = ScalerSkips(optimizer, log)
    skips.attach()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        model = nn.Linear(2, 2)
        copied.param_groups[0]["params"] = list(model.parameters())
        train(copied, model, None)
    skips.settle()
    assert log.drain(final=True) == ()


def test_an_optimizer_that_computes_the_flag_is_left_alone() -> None:
    class Own(torch.optim.SGD):
        @property
        def _step_supports_amp_scaling(self) -> bool:
            return False

    model = nn.Linear(2, 2)
    log = ScalarLog()
    skips = ScalerSkips(Own(model.parameters(), lr=0.1), log)
    skips.attach()
    skips.settle()
    skips.detach()
    assert log.drain(final=True) == ()
