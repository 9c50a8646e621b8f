"""Objects that a script made before its loop: whatever they are, the run begins."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from elche.runtime.watch.made_before import CopiesMade, parameters_in_optimizers


class Lazy(OrderedDict[Any, Any]):
    """As transformers' mappings of classes: its get is not a dict's."""

    def get(self, key: Any, default: Any) -> Any:  # type: ignore[override]
        raise TypeError(key)


def test_objects_of_other_kinds_are_passed_over() -> None:
    model = nn.Linear(3, 2)
    with torch.device("meta"):
        held: list[Any] = [nn.Linear(3, 2)]
    held += [nn.Linear.__new__(nn.Linear), Lazy(weight=1, bias=2)]
    held += [[torch.zeros(2, 3).to_sparse(), torch.zeros(2)], [1, 2]]
    copied = copy.deepcopy(model)
    made = CopiesMade(model, [])
    assert not made.take_written()
    copied.weight.detach().mul_(2.0)
    assert made.take_written()
    assert not made.take_written()  # said once


def test_parameters_of_an_optimizer_are_found() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert any(each is weight for each in parameters_in_optimizers())
    del optimizer
