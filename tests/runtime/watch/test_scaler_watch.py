"""Steps that a GradScaler skips, and scalers that have no gradients to work on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from elche.errors import ConfigError
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.scaler_watch import NAME, ScalerWatch
from elche.torch_internals.groups import SCALER_FLAG

BAD = (False, True, False, False, True, True)


def train(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    watch: ScalerWatch | None,
    scaler: torch.amp.GradScaler | None = None,
    loop: str = "zeroes last",
) -> list[torch.Tensor]:
    """A loop whose gradients overflow now and then; the weights after each step."""
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = []
    for is_bad in BAD:
        if loop == "zeroes first":
            optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if is_bad else 1.0)
        scaler.scale(loss).backward()
        if loop == "clips" and not getattr(optimizer, SCALER_FLAG, False):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if loop != "zeroes first":
            optimizer.zero_grad(set_to_none=loop != "keeps zeros")
        weights.append(next(model.parameters()).detach().clone())
        if watch is not None:
            watch.settle()
    return weights


def made(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "loop", ["zeroes first", "zeroes last", "keeps zeros", "clips"]
)
def test_skipped_steps_are_counted(fused: bool, loop: str) -> None:
    model, optimizer = made(fused=fused)
    before, log = vars(optimizer).get(SCALER_FLAG), ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    watch.attach()
    weights = train(optimizer, model, watch, loop=loop)
    assert log.drain(final=True) == ((NAME, 3.0, 6.0),)
    watch.detach()
    watch.detach()
    assert vars(optimizer).get(SCALER_FLAG) is before
    other, alone = made(fused=fused)
    expected = train(alone, other, None, loop=loop)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    assert log.drain(final=True) == ()


class OwnScaler(torch.amp.GradScaler):
    """Of another module, with a way of its own to leave steps out."""

    def step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        asks_itself = bool(getattr(optimizer, SCALER_FLAG, False))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        is_finite = all(bool(p.grad.isfinite().all()) for p in held)
        if asks_itself or is_finite:
            optimizer.step()

    def update(self, new_scale: object = None) -> None:
        """The scale stays."""


def test_a_scaler_of_another_module_is_counted_too() -> None:
    model, optimizer = made(fused=False)
    log = ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    train(optimizer, model, watch, OwnScaler("cpu", init_scale=4.0))
    assert log.drain(final=True) == ((NAME, 3.0, 6.0),)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_finite_gradients_that_wait_are_no_skipped_step(is_sparse: bool) -> None:
    """As where gradients accumulate, and somebody asks the flag at every batch."""
    model = nn.EmbeddingBag(3, 2, sparse=is_sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    for factor in (1.0, 1.0, float("nan")):
        (model(torch.tensor([[0, 1]])).sum() * factor).backward()
        assert not getattr(optimizer, SCALER_FLAG)
        watch.settle()
    assert log.drain(final=True) == ((NAME, 1.0, 1.0),)


def test_without_a_scaler_nothing_is_logged() -> None:
    model, optimizer = made(fused=True)
    log = ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    model(torch.ones(1, 2)).sum().backward()
    assert bool(getattr(optimizer, SCALER_FLAG))  # as frameworks ask, without a step
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    watch.settle()
    assert log.drain(final=True) == ()


def test_an_optimizer_can_be_copied_while_it_is_watched() -> None:
    _, optimizer = made(fused=True)
    log = ScalarLog()
    watch = ScalerWatch(optimizer, log)
    watch.attach()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        model = nn.Linear(2, 2)
        copied.param_groups[0]["params"] = list(model.parameters())
        train(copied, model, None)
    watch.settle()
    assert log.drain(final=True) == ()


def test_an_optimizer_that_computes_the_flag_is_left_alone() -> None:
    class Own(torch.optim.SGD):
        @property
        def _step_supports_amp_scaling(self) -> bool:
            return False

    model = nn.Linear(2, 2)
    log = ScalarLog()
    watch = ScalerWatch(Own(model.parameters(), lr=0.1), log)
    watch.attach()
    watch.settle()
    watch.detach()
    assert log.drain(final=True) == ()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused_where_gradients_are_summed(fused: bool) -> None:
    model, optimizer = made(fused=fused)
    is_refused = [True]
    watch = ScalerWatch(optimizer, ScalarLog())
    watch.refuse_where(is_refused.pop)
    watch.attach()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(ConfigError, match="a GradScaler cannot step where gradients"):
        scaler.step(optimizer)
    is_refused += [False] * 3
    scaler.step(optimizer)
    assert watch.has_scaler
