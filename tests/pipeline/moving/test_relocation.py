"""What a layer takes along when it moves, and what must be the same at both ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elche.errors import MismatchError
from elche.pipeline.moving.moving_optimizers import OptimizerGroups
from elche.pipeline.moving.relocation import (
    Baggage,
    Move,
    check_forms,
    form_of,
    moves_between,
    owners,
    release,
    unload,
)
from elche.pipeline.setup.building import join_ties, layers_of
from elche.pipeline.stage import Layer

CPU = torch.device("cpu")
NOTHING = OptimizerGroups([])


def test_moves_are_the_layers_whose_rank_changes() -> None:
    before = owners((0, 1, 0), (2, 2, 1))
    assert before == [0, 0, 1, 1, 0]
    assert moves_between(before, owners((1, 0), (1, 4))) == [
        *(Move(0, 0, 1), Move(2, 1, 0), Move(3, 1, 0))
    ]


def test_a_layer_arrives_as_it_was() -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    source.register_buffer("scratch", torch.tensor([4.0]), persistent=False)
    source[1].eval()
    source[0].bias.requires_grad_(False)
    source[0].weight.grad = torch.full((3, 2), 7.0)
    source(torch.randn(5, 2))
    source.double()
    target = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    target.register_buffer("scratch", torch.zeros(1), persistent=False)
    layer = Layer("body", target)
    come = unload(Baggage(Layer("body", source), NOTHING).message, layer, set())
    assert [moving.name for _, moving in come][:2] == ["body.0.weight", "body.0.bias"]
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert mine.dtype is torch.float64
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    assert torch.equal(target[0].weight.grad, source[0].weight.grad)
    assert target[0].bias.grad is None
    for mine, theirs in zip(target.buffers(), source.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert [one.training for one in target.modules()] == [True, True, False]


def test_a_parameter_that_lives_here_already_is_left_alone() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    before = target.weight.detach().clone()
    message = Baggage(Layer("x", source), NOTHING).message
    unload(message, Layer("x", target), {id(target.weight)})
    assert torch.equal(target.weight, before)
    assert torch.equal(target.bias, source.bias)


def test_a_layer_that_is_built_otherwise_is_refused() -> None:
    moves = [Move(0, 0, 1)]
    forms = [form_of(Layer("0", nn.Linear(2, n))) for n in (2, 3)]
    check_forms(moves, {0: {"0": forms[0]}, 1: {"0": forms[0]}})
    with pytest.raises(
        MismatchError, match=r"otherwise than rank 0 has it \(weight \["
    ):
        check_forms(moves, {0: {"0": forms[0]}, 1: {"0": forms[1]}})


def test_layers_are_built_without_values_or_random_numbers() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 3)
    layers = layers_of([meta, lambda: nn.Linear(3, 4)], None)
    before = torch.get_rng_state()
    built = [layers.build_empty(index, CPU) for index in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [list(one.module.weight.shape) for one in built] == [[3, 2], [4, 3]]
    assert not built[0].module.weight.is_meta
    release(built[0], CPU, True, set())
    assert meta.weight.is_meta


def test_a_module_whose_parameter_lives_on_is_not_released() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 3)
    built = layers_of([meta], None).build_empty(0, CPU)
    release(built, CPU, True, {id(built.module.weight)})
    assert not meta.weight.is_meta


def test_newcomers_take_the_parameter_that_is_there() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = last.weight
    built = {0: Layer("0", first), 3: Layer("3", last)}
    join_ties([[(0, "weight"), (3, "weight")]], built, newcomers={0})
    assert first.weight is last.weight
    assert first.weight is kept
