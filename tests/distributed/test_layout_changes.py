"""Parameters that are converted, moved or re-pointed while a run goes on."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.cases.tasks import Task, begin, error_of, identical, state_of
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(
    samples=64,
    batch_size=8,
    options={"deterministic": True, "speed_hints": (1.0, 0.5), "max_anchor": 1},
)


def _train(task: Task, change: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Two epochs, with a change of the model; the error, if any, and the model."""
    model, optimizer, loader = begin(task, **task.options)

    def loop() -> None:
        for epoch in range(2):
            for number, (x, y, _, _) in enumerate(loader):
                if epoch == 0 and number == 1:
                    _change(model, change)
                loss = F.cross_entropy(model(x.to(_dtype(model))), y)
                _backward(model, loss, change)
                optimizer.step()
                if change != "assigned":
                    optimizer.zero_grad()
            if epoch == 0:
                _change(model, change.removesuffix(" between"), is_between=True)

    return error_of(loop), state_of(model)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _backward(model: nn.Module, loss: torch.Tensor, change: str) -> None:
    if change != "assigned":
        loss.backward()
        return
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _change(model: nn.Module, change: str, *, is_between: bool = False) -> None:
    if change == "memory":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    elif change == "double":
        model.double()
    elif change == "strides" and is_between:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()


def _with(**options: Any) -> Task:
    shared = {**TASK.options, **options}
    if shared.get("policy") == "sync":
        del shared["max_anchor"]
    return dataclasses.replace(TASK, options=shared)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_new_memory_is_averaged_like_the_old(ranks2: RankPool, policy: str) -> None:
    """Nothing holds on to where parameters were: ``p.data = ...`` may be assigned."""
    plain, moved, turned = (
        ranks2.serve(_train, _with(policy=policy), change)
        for change in ("none", "memory", "strides")
    )
    assert [error for error, _ in (*plain, *moved, *turned)] == [""] * 6
    assert identical([state for _, state in (*plain, *moved)])
    assert identical([state for _, state in turned])


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("double", r"layout of 0\.weight has changed .* now \[32, 6\] float64 on cpu"),
        ("double between", r"0\.weight .* float64 on cpu, which changes its messag"),
    ],
)
def test_another_dtype_is_refused(
    ranks2: RankPool, policy: str, change: str, says: str
) -> None:
    for text, _ in ranks2.serve(_train, _with(policy=policy), change):
        assert re.search(says, text), text


@pytest.mark.parametrize(
    "options", [{"policy": "sync"}, {"policy": "cadence", "update": "gradients"}]
)
def test_gradients_without_a_backward_pass_are_refused(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    """Assigned, or written by a replayed graph: ranks would step apart unseen."""
    for text, _ in ranks2.serve(_train, _with(**options), "assigned"):
        assert "has a gradient, but no backward pass of this loop" in text, text


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_assigned_gradients_may_be_averaged_parameters(
    ranks2: RankPool, policy: str
) -> None:
    found = ranks2.serve(_train, _with(policy=policy), "assigned")
    assert [error for error, _ in found] == [""] * 2
    assert identical([state for _, state in found])
