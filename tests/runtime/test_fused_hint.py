"""The line that names a fused optimizer: only where it shortens steps and is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.runtime.rank_settings import FUSED_PARAMETERS, fused_hint

LARGE = (1000, FUSED_PARAMETERS // 1000)


def hint_of(kind: Any, shape: tuple[int, int] = LARGE, **settings: Any) -> str:
    return fused_hint(kind([nn.Parameter(torch.zeros(shape))], lr=0.1, **settings))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_large_model_with_adam_is_told(kind: Any) -> None:
    assert hint_of(kind).startswith(f"elche: {kind.__name__}(..., fused=True) steps")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"shape": (1000, FUSED_PARAMETERS // 1000 - 1)}),
        (torch.optim.SGD, {}),
    ],
)
def test_other_optimizers_and_choices_are_left_alone(
    kind: Any, settings: dict[str, Any]
) -> None:
    assert hint_of(kind, **settings) == ""


def test_parameters_of_other_devices_are_left_alone() -> None:
    held = nn.Parameter(torch.empty(LARGE, device="meta"))
    assert fused_hint(torch.optim.AdamW([held])) == ""
