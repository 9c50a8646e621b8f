"""Gradients that are lost or counted twice stop the step, with the names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.errors import ContributionError
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.split_backward.weight_gradients import WeightGradients
from tests.pipeline.cases.pipeline_cases import Checkpointed
from tests.pipeline.split_backward.test_split_backward import forward, runner_for


def pipeline(*layers: nn.Module, schedule: str = "zb-h1") -> Pipeline:
    return Pipeline(list(layers), F.cross_entropy, micro_batches=3, schedule=schedule)


DATA = (torch.randn(7, 6), torch.arange(7) % 3)


def test_a_weight_gradient_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = WeightGradients.add

    def lose(self: WeightGradients, entry: Any) -> None:
        if entry.weight.shape != (3, 5):
            keep(self, entry)

    monkeypatch.setattr(WeightGradients, "add", lose)
    pipe = pipeline(nn.Linear(6, 5), nn.Linear(5, 3))
    message = r"stage 0, schedule zb-h1, microbatch 0: parameter 1.bias, 1.weight"
    with pytest.raises(ContributionError, match=message):
        pipe.step(*DATA)


def test_a_weight_gradient_that_never_runs() -> None:
    runner = runner_for(nn.Linear(6, 4))
    runner.begin_step()
    runner.keep(0, forward(runner, 0, torch.randn(2, 6)))
    runner.backward_input(0, [torch.ones(2, 4)])
    with pytest.raises(ContributionError, match="its W never ran"):
        runner.end_step()


class Omitting(torch.autograd.Function):
    """Has no gradient for a parameter that its output depends on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.body = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(Omitting.apply(x, self.scale))


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_function_without_a_gradient_is_no_violation(schedule: str) -> None:
    module = Partial()
    pipeline(module, schedule=schedule).step(*DATA)
    assert module.scale.grad is None
    assert module.body.weight.grad is not None


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_parameter_that_autograd_never_comes_to(schedule: str) -> None:
    module = Partial()
    pipe = pipeline(module, schedule=schedule)
    module.scale._post_accumulate_grad_hooks.clear()  # whatever it has become
    with pytest.raises(ContributionError, match=r"parameter 0\.scale got no"):
        pipe.step(*DATA)


def test_a_deferred_weight_that_is_lost_under_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightGradients, "add", lambda *_: None)
    with pytest.raises(ContributionError, match=r"0\.body\.0\.weight.* got no contr"):
        pipeline(Checkpointed(False), nn.Linear(6, 3)).step(*DATA)


class Twofold(nn.Module):
    """Runs a backward of its own inside the stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        y.register_hook(self._again)
        return y

    def _again(self, grad: torch.Tensor) -> None:
        with torch.enable_grad():
            self.weight.sum().backward()


def test_a_gradient_that_is_counted_twice() -> None:
    with pytest.raises(ContributionError, match="more than one contribution"):
        pipeline(Twofold(), schedule="1f1b").step(*DATA)


class Sometimes(nn.Module):
    """A parameter that only some microbatches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.rare = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y + self.rare(x) if len(x) == 2 else y


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_parameters_that_nothing_depends_on_are_no_violation(schedule: str) -> None:
    module = Sometimes()
    pipeline(module, schedule=schedule).step(*DATA)
    assert module.never.grad is None
    assert module.rare.weight.grad is not None


def test_the_guard_can_be_switched_off() -> None:
    pipe = Pipeline([Twofold()], F.cross_entropy, micro_batches=3, guard=False)
    pipe.step(*DATA)


def test_a_second_pipeline_over_the_same_layers_defers_too() -> None:
    layer = nn.Linear(6, 3)
    with pipeline(layer) as first:
        first.step(*DATA)
        second = pipeline(layer)
        second.step(*DATA)
        assert second.stages[0].deferred == 3
    assert len(layer.weight._post_accumulate_grad_hooks) == 1, "closed: its own is gone"
