"""Models built on the meta device: values of buffers that no state_dict has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.pipeline import Pipeline

X, Y = torch.randn(6, 4), torch.randint(4, (6,))


class Turned(nn.Linear):
    """Adds angles, as rotary embeddings have them, and a mask."""

    def __init__(self, computes: bool) -> None:
        super().__init__(4, 4)
        self.computes = computes
        self.angles: torch.Tensor
        self.mask: torch.Tensor
        self.register_buffer("angles", torch.arange(4) / 4, persistent=False)
        self.register_buffer("mask", torch.tensor([True] * 4), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if getattr(self, "computes", False) and hasattr(self, "mask"):
            self.angles.data.copy_(torch.arange(4) / 4)
            self.mask.fill_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) + self.angles) * self.mask


def layers(computes: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, nn.Sequential(Turned(computes), nn.BatchNorm1d(4)), last]


def pipeline(model: Any, **options: Any) -> Pipeline:
    return Pipeline(model, F.cross_entropy, micro_batches=2, **options)


def on_meta(computes: bool) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*layers(computes))


def test_a_buffer_that_its_module_computes() -> None:
    model = on_meta(computes=True)
    expected = pipeline(nn.Sequential(*layers(True)))
    with pipeline(model, init="load") as pipe:
        with pytest.raises(ConfigError, match=r"loaded 0.weight, .* more since: load"):
            pipe.evaluate(X)
        pipe.load_state_dict(expected.state_dict())
        assert pipe.step(X, Y).loss == expected.step(X, Y).loss
        assert model[2].weight is model[0].weight


@pytest.mark.parametrize("init", [None, "load", lambda layer: None])
def test_a_buffer_that_nothing_computes(init: Any) -> None:
    """The model stays as it was, and can be used for another attempt."""
    model = on_meta(computes=False)
    before = {name: id(one) for name, one in named(model).items()}
    with pytest.raises(ConfigError, match=r"nothing has .* 1.0.angles, 1.0.mask since"):
        pipeline(model, init=init)
    assert {name: id(one) for name, one in named(model).items()} == before
    assert all(one.is_meta for one in named(model).values())


class Odd(nn.Linear):
    """Has buffers that look as if nothing had written to them."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.full((2,), torch.nan))
        self.register_buffer("most", torch.tensor(torch.iinfo(torch.int64).max))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        mask = torch.tensor([True] * 4)
        self.register_buffer("mask", mask, persistent=False)


def test_values_of_a_file_that_look_blank() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Odd(), nn.Linear(4, 4))
    with pipeline(model, init="load") as pipe:
        pipe.load_state_dict(nn.Sequential(Odd(), nn.Linear(4, 4)).state_dict())
        assert pipe.step(X, Y).loss > 0


@pytest.mark.parametrize("init", [None, "load"])
def test_weights_of_a_layer_that_is_partly_on_meta(init: Any) -> None:
    """As after load_state_dict(assign=True), which has no values of such buffers."""
    model, saved = on_meta(computes=True), nn.Sequential(*layers(True)).state_dict()
    wanted = {name: one.clone() for name, one in saved.items()}
    model.load_state_dict(saved, assign=True)
    with pipeline(model, init=init) as pipe:
        found = pipe.state_dict()
    assert all(torch.equal(one, wanted[name]) for name, one in found.items())


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Placed(nn.Module):
    """A parameter between submodules, and an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = x + self.places if mask is None else (x + self.places) * mask
        for block in self.blocks:
            x = block(x)
        return x


def test_a_call_without_an_argument_of_the_sample() -> None:
    """The model is cut again, of which a part was on the meta device."""
    whole, mask = Placed(), torch.rand(6, 4)
    with torch.device("meta"):
        model = Placed()
    sample = {"x": X[:2], "mask": mask[:2]}
    with pipeline(model, init="load", sample=sample) as pipe:
        pipe.load_state_dict(whole.state_dict())
        for batch in ({"x": X, "mask": mask}, {"x": X}, {"x": X, "mask": None}):
            found = pipe.evaluate(batch).outputs
            assert torch.allclose(found, whole(**batch), atol=1e-6)
        with pytest.raises(ConfigError, match="lacks the model's argument mask"):
            pipe.step({"x": X}, Y)
