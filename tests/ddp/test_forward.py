"""Tensors and samples of a forward pass, capacity of buckets."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import prune

from elche.comm.tensors.nested import outputs_in, tensors_in
from elche.ddp.model_checks import cap_mb, refuse_changes
from elche.ddp.pass_weights import samples_in
from elche.errors import ConfigError


@dataclass
class Output:
    loss: torch.Tensor
    rest: dict[str, Any]


def test_tensors_are_found_in_nested_outputs() -> None:
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    nested = [Output(a, {"x": (b, "text"), "y": [c, None]}), 7]
    assert [t.numel() for t in tensors_in(nested)] == [1, 2, 3]


def test_outputs_are_found_in_objects_too() -> None:
    class Held:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value
            self.me = self
            self.layer = nn.Linear(1, 1)

    a, b = torch.zeros(1), torch.zeros(2)
    output = [Categorical(logits=torch.zeros(3)), (Held(a), {"b": b}), "text", 3]
    assert {3, 1, 2} == {t.numel() for t in outputs_in(output)}
    assert [t.numel() for t in tensors_in(output)] == [2]


PACKED = nn.utils.rnn.pack_padded_sequence(
    torch.zeros(3, 5, 2), torch.tensor([5, 2, 1]), batch_first=True
)


@pytest.mark.parametrize(
    ("inputs", "dim", "samples"),
    [
        (((torch.zeros(4, 2),), {}), 0, 4.0),
        (((torch.zeros(4, 2),), {}), 1, 2.0),
        (((torch.tensor(1.0),), {"x": torch.zeros(5, 2)}), 0, 5.0),
        ((("text",), {}), 0, 1.0),
        ((("text", PACKED), {}), 0, 3.0),
        (((), {"x": [torch.zeros(4, 2)]}), 0, 4.0),
    ],
)
def test_samples_are_counted_along_the_dimension(
    inputs: Any, dim: int, samples: float
) -> None:
    assert samples_in(inputs, dim) == samples


def test_what_is_reduced_may_move_and_nothing_else_may_be_trained() -> None:
    group: Any = SimpleNamespace(world_size=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    trained, ignored = dict(model.named_parameters()), frozenset({"2.own"})
    prune.l1_unstructured(model[0], "weight", 0.5)
    model[2].own = nn.Parameter(torch.zeros(2))
    refuse_changes(group, model, trained, ignored)
    model[2].more = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"2\.more was frozen .*, or not there"):
        refuse_changes(group, model, trained, ignored)
    model[2].weight = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(ConfigError, match=r"2\.weight was replaced"):
        refuse_changes(group, model, trained, ignored)


@pytest.mark.parametrize(
    ("elements", "expected_mb"), [(10, 2), (16 * 2**20, 4), (2**29, 25)]
)
def test_the_capacity_grows_with_the_model(elements: int, expected_mb: float) -> None:
    large = nn.Module()
    large.weight = nn.Parameter(torch.empty(elements, device="meta"))
    large.frozen = nn.Parameter(torch.empty(2**29, device="meta"), requires_grad=False)
    assert cap_mb(large) == expected_mb
