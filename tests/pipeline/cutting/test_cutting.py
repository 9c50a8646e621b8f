"""What cutting a module keeps, where it cuts, and what it refuses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import SplitPoint

from elche.errors import ConfigError
from elche.pipeline.cutting.segments import cut_model
from elche.pipeline.setup.building import layers_of, layers_of_split
from tests.pipeline.cases.pipeline_cut_cases import MODELS, Experts, Gpt, ResNet, Routed

WIDTH = 4


class Inner(nn.Module):
    """Two layers, and what a test wants done between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.between(self, self.first(x)))


class Outer(nn.Module):
    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Inner(between)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(x))


class TakesObjects(nn.Linear):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return super().forward(x)


def run(layers: list[nn.Module], value: Any) -> Any:
    """What a list of layers means."""
    for layer in layers:
        if isinstance(value, tuple):
            value = layer(*value)
        else:
            value = layer(**value) if isinstance(value, dict) else layer(value)
    return value


def sample_for(model: str, samples: int = 3) -> torch.Tensor:
    if model == "gpt":
        return torch.randint(11, (samples, 5))
    return torch.randn((samples, 3, 64, 64) if model == "resnet" else (samples, 8))


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_model_is_the_model(model: str) -> None:
    whole = MODELS[model]()
    whole.train()
    next(iter(whole.children())).eval()
    before = copy.deepcopy(whole.state_dict())
    modes = [one.training for one in whole.modules()]
    call, drawn = nn.Module.__call__, torch.random.get_rng_state()
    sample = sample_for(model)
    layers = cut_model(whole, None, sample)
    assert nn.Module.__call__ is call
    assert modes == [one.training for one in whole.modules()]
    assert all(torch.equal(one, before[n]) for n, one in whole.state_dict().items())
    again = copy.deepcopy(layers)
    torch.random.set_rng_state(drawn)
    assert torch.equal(sample_for(model), sample), "nothing was drawn in between"
    mine = {id(one) for layer in layers for one in layer.parameters()}
    assert mine == {id(one) for one in whole.parameters()}
    assert set(layers_of_split(whole, layers).state_names) == set(before)
    whole.eval()
    for layer in again:
        layer.eval()
    for samples in (3, 1, 5):
        x = sample_for(model, samples)
        for found in (run(layers, x), run(again, x)):
            expected = whole(x)
            if isinstance(expected, dict):
                found, expected = found["logits"], expected["logits"]
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("points", "count"),
    [
        (None, 10),
        (["layer2"], 2),
        (["layer2", "layer3.1", "fc"], 4),
        ({"layer1": SplitPoint.END, "layer3.0": SplitPoint.BEGINNING}, 3),
    ],
)
def test_where_it_cuts(points: Any, count: int) -> None:
    layers = cut_model(ResNet(), points, torch.randn(2, 3, 32, 32))
    assert len(layers) == count
    if points is not None and "layer2" in points:
        first = {name for name, _ in layers[0].named_parameters()}
        assert any(".layer1." in name for name in first)
        assert not any(".layer2." in name for name in first)


def test_values_on_another_device_than_the_trace() -> None:
    """Tensors that forward makes follow its input."""
    layers = cut_model(Gpt(), None, sample_for("gpt"))
    for layer in layers:
        layer.to("meta")
    found = run(layers, torch.zeros(7, 4, dtype=torch.int64, device="meta"))
    assert found["logits"].shape == (7, 4, 11)
    assert found["logits"].is_meta


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Gpt()
    layers = cut_model(model, None, sample_for("gpt"))
    assert all(one.is_meta for layer in layers for one in layer.parameters())
    for layer in layers:
        layer.to_empty(device="cpu")
    assert run(layers, sample_for("gpt", 1))["logits"].device.type == "cpu"


class Doubled(nn.Linear):
    """Overrides the call itself, as transformers does for checkpointing."""

    def __call__(self, x: torch.Tensor) -> Any:
        return 2 * super().__call__(x)


def test_a_call_that_is_overridden_stays_whole() -> None:
    model = Outer(lambda model, x: model.doubled(x))
    model.inner.add_module("doubled", Doubled(WIDTH, WIDTH))
    layers = cut_model(model, ["inner.second", "last"], torch.randn(3, WIDTH))
    x = torch.randn(2, WIDTH)
    assert torch.equal(run(layers, x), model(x))


@pytest.mark.parametrize("points", [["inner.second"], ["last"]])
def test_a_module_that_counts_and_runs_twice(points: list[str]) -> None:
    """Two ranks would each count half of its calls."""
    model = Outer(lambda model, x: model.norm(x))
    norm = nn.BatchNorm1d(WIDTH)
    model.inner.add_module("norm", norm)
    model.inner.second = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH))
    refused: Any = pytest.raises(
        ConfigError, match=r"changes the buffer inner\..*_tracked in 2 layers"
    )
    with refused if points == ["inner.second"] else nullcontext():
        cut_model(model, points, torch.randn(3, WIDTH))
    assert norm.num_batches_tracked == 0


def test_what_forward_does_not_use_stays_in_the_state() -> None:
    model = Outer(lambda model, x: x)
    model.inner.add_module("unused", nn.Linear(2, 2))
    layers = cut_model(model, ["inner.second"], torch.randn(3, WIDTH))
    found = layers_of_split(model, layers)
    names = {name for one in found.aliases for name in (one or {}).values()}
    assert names == set(model.state_dict())


def _freezes(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.taking(x)  # type: ignore[no-any-return]


def _infers(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
    return x + y.clone()


def _casts(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return (x @ x.T @ x).float()


def _counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.counted.add_(1)
    return x * model.counted


def _changes(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.taking(x)
    x[:, :2].add_(1)
    return x + y


BETWEEN: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "layer drop": (
        lambda model, x: model.taking(x) if not model.training else x,
        r"forward calls other submodules in training .* \(inner.taking\)",
    ),
    "a module without gradients": (
        _freezes,
        r"uses torch.no_grad around code between inner.first and inner.second",
    ),
    "inference": (_infers, "uses torch.inference_mode between inner.first and"),
    "autocast": (_casts, "uses autocast around code between inner.first and"),
    "a buffer": (_counts, "changes a tensor .* in place between inner.first and"),
    "values": (
        lambda model, x: x if x.sum() > 0 else -x,
        r"forward of inner \(Inner\) cannot be traced with this sample: values of "
        "tensors decide what runs .*; put that code into a",
    ),
    "an error": (
        lambda model, x: x @ x[:, :1],
        r"with this sample: RuntimeError.*; first check that the model runs",
    ),
    "samples": (
        lambda model, x: x if x.shape[0] == 3 else -x,
        "forward of Outer works only for 3 samples, as many as sample= has",
    ),
    "constants": (
        lambda model, x: x + torch.tensor([[0.0] * 4] * 1025).sum(0),
        r"makes a constant of shape \[1025, 4\] .* between inner.first and",
    ),
    "in place": (
        _changes,
        r"changes a tensor .* in place between inner.taking and inner.second",
    ),
    "an object": (
        lambda model, x: model.taking(x, object()),
        r"inner.taking \(TakesObjects\) is given a object, which layers cannot",
    ),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_what_cannot_be_cut_is_named(kind: str) -> None:
    between, message = BETWEEN[kind]
    model = Outer(between)
    model.inner.add_module("taking", TakesObjects(WIDTH, WIDTH))
    model.inner.register_buffer("counted", torch.zeros(()))
    call = nn.Module.__call__
    with pytest.raises(ConfigError, match=message):
        cut_model(model, ["inner.taking", "inner.second"], torch.randn(3, 4))
    assert nn.Module.__call__ is call


def _without_grad(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
        y += x.detach()
        y = torch.where(y > 0, y, x)
    return x * y.exp()


def _changed_without_grad(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x += 1
    return x * x.detach()


def _in_a_mode(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.training:
        return x * model.scale - model.second.weight.sum(0)
    return x + model.shift


FOLLOWED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda model, x: F.dropout(x, 0.5, model.training),
    "no_grad": _without_grad,
    "change in no_grad": _changed_without_grad,
    "mode": _in_a_mode,
    "constants": lambda model, x: x * torch.tensor([1.0, 2.0, -math.inf, 3.0]).exp(),
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_code_between_modules_follows_their_mode(kind: str) -> None:
    """Gradients too; copies take both modes along."""
    torch.manual_seed(0)
    model = Outer(FOLLOWED[kind])
    model.inner.scale = nn.Parameter(torch.rand(WIDTH))
    model.inner.register_buffer("shift", torch.rand(WIDTH), persistent=False)
    layers = cut_model(model.eval(), ["inner.second", "last"], torch.randn(3, WIDTH))
    held = {name for one in layers for name in one.state_dict() if "held" in name}
    assert len(held) == 2 * (kind == "mode"), "all but shift are saved"
    x = torch.randn(5, WIDTH)
    weight = model.inner.first.weight
    for made, is_training in ((layers, True), (copy.deepcopy(layers), False)):
        found = []
        for whole in (made, [model]):
            for one in whole:
                one.train(is_training)
            torch.manual_seed(1)
            found.append(run(whole, x))
        assert torch.equal(*found)
        if made is layers:
            gradients = [torch.autograd.grad(one.sum(), weight)[0] for one in found]
            assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["dropout", "no_grad"])
def test_modules_of_one_layer_in_different_modes(kind: str) -> None:
    """Code that differs could follow only some of them."""
    model = Outer(lambda model, x: FOLLOWED[kind](model, model.taking(x)))
    model.inner.add_module("taking", TakesObjects(WIDTH, WIDTH))
    layers = cut_model(model, ["inner.taking"], torch.randn(3, WIDTH))
    model.inner.second.eval()
    refused: Any = pytest.raises(ConfigError, match="set one mode")
    with refused if kind == "dropout" else nullcontext():
        run(layers, torch.randn(3, WIDTH))
    layers[1].body.eval()
    with refused if kind == "dropout" else nullcontext():
        run(layers, torch.randn(3, WIDTH))


def test_blocks_routed_by_values_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Experts(), Experts(), nn.Linear(8, 3))
    assert len(cut_model(model, ["1", "3"], torch.randn(2, 8))) == 3


class Flagging(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x, bool(x.sum() > 0)


def test_numbers_that_depend_on_values_are_refused() -> None:
    model = Outer(lambda model, x: model.flagging(x)[0])
    model.inner.add_module("flagging", Flagging(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match=r"inner.flagging .* cannot be traced"):
        cut_model(model, ["inner.second"], torch.randn(3, WIDTH))


def test_sizes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be traced with this sample"):
        cut_model(Routed(least=0.0), None, torch.randn(9, 8))


class Pooling(nn.Module):
    """Reduces a sequence."""

    runs = 0

    def __init__(self, layer_idx: int, factor: int) -> None:
        super().__init__()
        self.layer_idx, self.factor = layer_idx, factor
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Pooling.runs += type(x) is not torch.Tensor
        return self.linear(x)[:, :: self.factor]


@pytest.mark.parametrize(("factors", "runs"), [((1, 1, 1, 1), 4), ((2, 1, 2, 3), 8)])
def test_blocks_that_repeat_are_traced_once(factors: Any, runs: int) -> None:
    """In each mode, but the first one, whose input needs no gradient."""
    model = nn.Sequential(*(Pooling(*one) for one in enumerate(factors)))
    Pooling.runs = 0
    layers = cut_model(model, ["2"], torch.randn(2, 30, WIDTH))
    assert Pooling.runs == runs
    x = torch.randn(3, 24, WIDTH)
    assert torch.equal(run(layers, x), model(x))


class ByPlace(nn.Module):
    """Does something else in the third place, and returns it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        return (x[:, ::2] if self.layer_idx == 2 else x), self.layer_idx


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ByPlace(place) for place in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x, place = block(x)
            x = x * place + x.shape[1]
        return x


def test_blocks_that_read_their_place_are_not_alike() -> None:
    model, x = Places(), torch.randn(2, 30, WIDTH)
    assert torch.equal(run(cut_model(model, None, x), x), model(x))
    assert not hasattr(ByPlace, "layer_idx")


class Chosen(nn.Module):
    """Does something else for long inputs, and takes a mask and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, mask: Any = None, doubled: bool = False
    ) -> torch.Tensor:
        x = self.first(x)
        if x.shape[1] > 8:
            x = x[:, -8:]
        if mask is not None:
            x = x * mask[:, :, None]
        return self.second(x * 2 if doubled else x)


def test_calls_unlike_the_sample_are_refused() -> None:
    sample = {"x": torch.randn(3, 5, WIDTH), "mask": torch.ones(3, 5), "doubled": True}
    model = Chosen()
    layers = cut_model(model, ["second"], sample)
    x, mask = torch.randn(1, 7, WIDTH), torch.rand(1, 7)
    expected = model(x, mask, True)
    for args, keywords in (
        ((x, mask), {}),
        ((x,), {"mask": mask, "doubled": True}),
        ((), {"x": x, "mask": mask}),
    ):
        assert torch.equal(run(layers[1:], layers[0](*args, **keywords)), expected)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x,), {}, "the model's argument mask differs in form from the sample"),
        ((x, mask, False), {}, "got False, the sample has True"),
        ((x, mask), {"scale": 1}, "the model's forward does not take this batch"),
        ((x[0], mask), {}, "expected tensors of [3, 2] dimensions"),
        ((x[..., :3], mask), {}, f"cut for a size of {WIDTH}, which its forward fixes"),
        ((torch.randn(1, 9, 4), torch.rand(1, 9)), {}, "the model was cut for sizes"),
    ]
    for args, keywords, message in wrong:
        with pytest.raises(ConfigError, match=re.escape(message)):
            layers[0](*args, **keywords)


class ByPosition(nn.Linear):
    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        return super().forward(x)


def torn() -> nn.Module:
    """A model of which a part is elsewhere."""
    model = Gpt()
    model.blocks[1].to("meta")
    return model


@pytest.mark.parametrize(
    ("model", "points", "sample", "message"),
    [
        (Gpt(), None, None, "a Gpt is cut by tracing it: give sample="),
        (Gpt(), None, torch.zeros(1, 5).long(), "at least two samples"),
        (Gpt(), None, "text", "at least two samples"),
        (Gpt(), None, {"token": torch.zeros(2, 5)}, "does not take this batch"),
        (Gpt(), ["blocks"], torch.zeros(2, 5), "got 'blocks'; the model has blocks.0"),
        (
            Gpt(),
            ["block.1"],
            torch.zeros(2, 5),
            "got 'block.1'; the model has blocks.1",
        ),
        (Gpt(), "head", torch.zeros(2, 5), "write split_points=['head']"),
        (torn(), None, torch.zeros(2, 5).long(), "is on cpu and on meta; build all"),
        (Gpt(), {"head": 1}, torch.zeros(2, 5), "expected SplitPoint.BEGINNING or"),
        (Gpt(), ["tokens"], torch.zeros(2, 5).long(), "cut the model into 1 layers"),
        (ByPosition(2, 2), None, torch.zeros(2, 2), "takes x by position only"),
    ],
)
def test_wrong_samples_and_names(
    model: nn.Module, points: Any, sample: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        cut_model(model, points, sample)


class Chain(nn.Module):
    """Pooling, activations and a softmax among the members of its chains."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """No chain of blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU()
        self.norm, self.flatten = nn.BatchNorm2d(4, affine=False), nn.Flatten()
        self.head = nn.Linear(4 * 7 * 7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.flatten(self.norm(self.relu(self.conv(x))))
        return self.head(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "count"), [(Chain, 3), (Plain, 2)])
def test_every_layer_has_parameters(kind: type[nn.Module], count: int) -> None:
    """An optimizer refuses a rank that has none."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 3, 9, 9)
    layers = cut_model(model, None, x)
    assert [len(list(layer.parameters())) for layer in layers] == [2] * count
    found = x
    for layer in layers:
        found = layer(*found) if isinstance(found, tuple) else layer(found)
    assert torch.equal(found, model(x))


def test_split_points_go_with_a_module_alone() -> None:
    x = torch.zeros(2, 5).long()
    for model, split in ((Gpt(), lambda m: [m.tokens]), ([nn.Linear(2, 2)], None)):
        with pytest.raises(ConfigError, match="cuts a module, and excludes split="):
            layers_of(model, split, ["head"], x)
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert len(layers_of(chain, None)) == 3, "no sample is needed"
    assert len(layers_of(chain, None, ["2"], torch.zeros(2, 4))) == 2
