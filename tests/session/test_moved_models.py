"""The optimizer trains the model that `elche.setup` has moved, or setup refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.session.setup import move_model

CPU = torch.device("cpu")


@contextmanager
def new_objects() -> Iterator[None]:
    """`Module.to` makes new parameters, as on a device that an extension adds."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class Replacing(nn.Linear):
    """A layer whose moves replace its weight, whatever torch's switches say."""

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Replacing:
        self.weight = nn.Parameter(fn(self.weight.detach().clone()))
        return self


class Elsewhere(nn.Identity):
    """A layer with a buffer on another device, until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("there", torch.empty((), device="meta"), persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Elsewhere:
        self.there = torch.zeros(())
        return self


def trained(model: nn.Module) -> list[torch.Tensor]:
    """The model's parameters after an epoch of a loop that elche has set up."""
    data = TensorDataset(torch.eye(4), torch.arange(4.0).view(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = elche.setup(model, optimizer, DataLoader(data, 2))
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    elche.shutdown()
    return [parameter.detach().clone() for parameter in model.parameters()]


def tied() -> nn.Module:
    """Two layers with one weight."""
    torch.manual_seed(1)
    layers = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(*layers, Elsewhere())
    model[1].weight = model[0].weight
    return model


def test_where_moves_make_new_parameters_the_optimizer_trains_them() -> None:
    expected = trained(tied())
    with new_objects():
        model = tied()
        found = trained(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(found) == 5  # still tied
    assert not torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.parametrize("is_held", [False, True])
def test_parameters_that_become_other_objects_are_refused(is_held: bool) -> None:
    layer: nn.Module = nn.Linear(4, 1) if is_held else Replacing(4, 1)
    model = nn.Sequential(layer, Elsewhere())
    held = [weakref.ref(each) for each in model.parameters()] if is_held else []
    told = (
        "swap Linear.weight" if is_held else r"\(0.weight\), which the optimizer does"
    )
    with new_objects(), pytest.raises(elche.ConfigError, match=told):
        move_model(model, CPU)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert len(held) == 2 * is_held


@pytest.mark.parametrize("change", ["", "trained", "held"])
def test_frozen_parameters_that_no_optimizer_holds_may_be_replaced(change: str) -> None:
    model, head = Replacing(4, 1), nn.Linear(1, 1)
    model.requires_grad_(change == "trained")
    held = [*head.parameters(), *(model.parameters() if change == "held" else ())]
    optimizers = [torch.optim.SGD(held)]
    if not change:
        move_model(model, CPU, optimizers)
        return
    told = r"\(weight\), which the optimizer does"
    with pytest.raises(elche.ConfigError, match=told):
        move_model(model, CPU, optimizers)


def test_a_swap_keeps_what_the_user_wrote_on_parameters() -> None:
    model = tied()
    model[0].weight.no_decay = True
    with new_objects():
        move_model(model, CPU)
    assert model[0].weight.no_decay
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad_hook"])
def test_hooks_that_a_swap_would_drop_are_refused(kind: str) -> None:
    model, called = nn.Sequential(nn.Linear(4, 1), Elsewhere()), []
    getattr(model[0].weight, f"register_{kind}")(called.append)
    told = r"drop the hooks of its parameters \(0.weight\); call model.to"
    with new_objects(), pytest.raises(elche.ConfigError, match=told):
        move_model(model, CPU)
    model[1].there = torch.zeros(())  # as the message says: moved before
    with new_objects():
        move_model(model, CPU)
    model(torch.ones(1, 4)).sum().backward()
    assert len(called) == 1


def test_a_model_that_is_there_already_is_left_alone() -> None:
    model = nn.Linear(4, 1)
    held, before = weakref.ref(model.weight), model.weight
    with new_objects():
        move_model(model, CPU)
    assert held() is before
    assert model.weight is before
