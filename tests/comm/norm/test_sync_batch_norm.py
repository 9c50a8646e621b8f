"""SyncBatchNorm is BatchNorm of the union batch, however it is divided."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from elche.comm.norm import norm_scope
from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import (
    SyncBatchNorm,
    bind_sync_batchnorm,
    convert_sync_batchnorm,
    sync_batchnorm_layers,
)
from elche.errors import CommunicationError, ConfigError, ProtocolError
from tests.comm.thread_group import ThreadGroup, on_ranks

C = 5
SHAPES = {"1d": (), "1d-long": (4,), "2d": (3, 2), "3d": (2, 2, 2)}
LAYERS = {"1d": nn.BatchNorm1d, "1d-long": nn.BatchNorm1d, "2d": nn.BatchNorm2d}


@dataclass
class Result:
    """What a rank holds after one step."""

    out: torch.Tensor
    of_input: torch.Tensor
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def _layer(kind: str = "2d", **options: Any) -> nn.Module:
    layer: nn.Module = LAYERS.get(kind, nn.BatchNorm3d)(C, **options).double()
    generator = torch.Generator().manual_seed(1)  # ranks are threads
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return layer


def _batch(samples: int, kind: str = "2d", scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, C, *SHAPES[kind], generator=generator).double()
    return x * scale + 3.0 * scale


def _targets(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(7.0 * x.detach())


def _loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over samples of a sum per sample."""
    return (out - target).square().flatten(1).sum(1).mean()


def _result(layer: nn.Module, x: torch.Tensor, out: torch.Tensor) -> Result:
    assert x.grad is not None
    return Result(
        out.detach(),
        x.grad,
        {name: p.grad for name, p in layer.named_parameters() if p.grad is not None},
        {name: b.clone() for name, b in layer.named_buffers()},
    )


def _alone(layer: nn.Module, batch: torch.Tensor, repeats: int = 1) -> Result:
    x = batch.clone().requires_grad_()
    for _ in range(repeats):
        out = layer(x)
    _loss(out, _targets(batch)).backward()
    return _result(layer, x, out)


def _converted(module: nn.Module, group: ThreadGroup) -> Any:
    made = convert_sync_batchnorm(module)
    bind_sync_batchnorm(made, group)
    return made


def _shared(
    group: ThreadGroup, part: torch.Tensor, layer: nn.Module, repeats: int = 1
) -> Result:
    converted = _converted(copy.deepcopy(layer), group)
    x = part.clone().requires_grad_()
    for _ in range(repeats):
        out = converted(x)
    targets = _targets(part)
    loss = _loss(out, targets) if len(part) else out.sum()
    loss.backward()
    return _result(converted, x, out)


def _compare(ranks: list[Result], whole: Result, sizes: list[int]) -> None:
    """Ranks' results, put together by samples, are those of one process."""
    total = sum(sizes)
    close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([r.out for r in ranks]), whole.out, **close)
    weighted = [
        r.of_input * (size / total) for r, size in zip(ranks, sizes, strict=True)
    ]
    torch.testing.assert_close(torch.cat(weighted), whole.of_input, **close)
    for name, grad in whole.grads.items():
        mean = sum(
            r.grads[name] * (size / total)
            for r, size in zip(ranks, sizes, strict=True)
            if size
        )
        torch.testing.assert_close(mean, grad, **close)
    for name, value in whole.buffers.items():
        for rank in ranks:
            torch.testing.assert_close(
                rank.buffers[name], value, rtol=1e-12, atol=1e-12
            )
            assert torch.equal(rank.buffers[name], ranks[0].buffers[name])


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 1e-2},
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_unequal_shares_are_the_union_batch(kind: str, options: dict[str, Any]) -> None:
    sizes = [6, 1, 3]
    batch = _batch(10, kind)
    layer = _layer(kind, **options)
    whole = _alone(copy.deepcopy(layer), batch, repeats=2)
    ranks = on_ranks(3, _shared, batch.split(sizes), [layer] * 3, [2] * 3)
    _compare(ranks, whole, sizes)


@given(
    sizes=st.lists(st.integers(0, 7), min_size=2, max_size=4).filter(
        lambda sizes: sum(sizes) > 1
    ),
    exponent=st.integers(-3, 3),
)
@example(sizes=[0, 3], exponent=-3)
def test_any_division_of_a_batch(sizes: list[int], exponent: int) -> None:
    batch = _batch(sum(sizes), "1d", 10.0**exponent)
    layer = _layer("1d", eps=1e-12)
    whole = _alone(copy.deepcopy(layer), batch)
    ranks = on_ranks(len(sizes), _shared, batch.split(sizes), [layer] * len(sizes))
    # Terms this large cancel in the gradient, here and in torch alike.
    scale = 1.0 / float(batch.std(0, correction=0).min())
    for result in (*ranks, whole):
        result.of_input = result.of_input / scale
    _compare(ranks, whole, sizes)


def test_a_large_mean_does_not_cancel() -> None:
    batch = _batch(12, "1d") + 1e6
    whole = _alone(_layer("1d"), batch)
    ranks = on_ranks(3, _shared, batch.split([2, 3, 7]), [_layer("1d")] * 3)
    torch.testing.assert_close(
        ranks[0].buffers["running_var"],
        whole.buffers["running_var"],
        rtol=1e-9,
        atol=0.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    def half(group: ThreadGroup, part: torch.Tensor) -> torch.Tensor:
        layer = _converted(nn.BatchNorm2d(C), group)
        x = part.to(dtype).requires_grad_()
        out = layer(x)
        assert out.dtype == dtype
        out.float().square().mean().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert layer.weight.grad is not None
        return torch.cat([out.detach().float().flatten(), layer.running_var])

    batch = _batch(9)
    ranks = on_ranks(2, half, batch.split([3, 6]))
    layer = nn.BatchNorm2d(C)
    whole = layer(batch.to(dtype).float())
    found = torch.cat([rank[:-C] for rank in ranks])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, whole.flatten(), rtol=bound, atol=bound)
    torch.testing.assert_close(ranks[0][-C:], layer.running_var, rtol=1e-5, atol=1e-5)


def _weighed(
    group: ThreadGroup, part: torch.Tensor, weight: float, layer: nn.Module
) -> Result:
    """The layer's result where the rank's loss has this weight."""
    converted = convert_sync_batchnorm(copy.deepcopy(layer))
    scope = bind_sync_batchnorm(nn.Sequential(converted), group)
    assert scope is not None
    scope.weigh(weight)
    x = part.clone().requires_grad_()
    out = converted(x)
    _loss(out, _targets(part)).backward()
    return _result(converted, x, out)


def test_a_batch_of_weight_zero_counts_nowhere() -> None:
    batch, layer = _batch(6), _layer()
    whole = _alone(copy.deepcopy(layer), batch)
    ghost = torch.full_like(batch[:2], float("nan"))
    parts, weights = [batch[:4], ghost, batch[4:]], [4 / 6, 0.0, 2 / 6]
    ranks = on_ranks(3, _weighed, parts, weights, [layer] * 3)
    assert not ranks[1].of_input.any()
    for name, value in whole.buffers.items():
        torch.testing.assert_close(ranks[1].buffers[name], value, rtol=1e-12, atol=0.0)
    _compare([ranks[0], ranks[2]], whole, [4, 2])


class _Block(nn.Module):
    """The same norm twice in one forward, perhaps recomputed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.BatchNorm1d(C)
        self.reentrant = reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(torch.tanh(self.norm(x))))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.body(x)
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_double_use_and_recomputation(reentrant: bool | None) -> None:
    torch.manual_seed(4)
    plain = _Block(None).double()
    batch, sizes = _batch(8, "1d"), [3, 5]

    def run(group: ThreadGroup, part: torch.Tensor) -> Result:
        block = _Block(reentrant).double()
        block.load_state_dict(plain.state_dict())
        return _shared(group, part, block)

    whole = _alone(copy.deepcopy(plain), batch)
    ranks = on_ranks(2, run, batch.split(sizes))
    assert int(ranks[0].buffers["norm.num_batches_tracked"]) == 2
    _compare(ranks, whole, sizes)


def test_recomputation_alone_leaves_statistics() -> None:
    block = convert_sync_batchnorm(_Block(False).double())
    result = _alone(block, _batch(8, "1d"))
    assert int(result.buffers["norm.num_batches_tracked"]) == 2


def test_without_gradients_statistics_are_tracked() -> None:
    batch = _batch(7)
    whole = _layer()
    with torch.no_grad():
        whole(batch)

    def run(group: ThreadGroup, part: torch.Tensor) -> dict[str, torch.Tensor]:
        layer = _converted(_layer(), group)
        with torch.inference_mode():
            layer(part)
        out = layer(part.requires_grad_())
        out.sum().backward()
        return dict(layer.named_buffers())

    with torch.no_grad():
        whole(batch)
    for buffers in on_ranks(2, run, batch.split([3, 4])):
        for name, value in whole.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)


def test_evaluation_is_torchs_and_waits_for_nobody() -> None:
    def run(group: ThreadGroup) -> None:
        layer = _layer()
        expected = layer.eval()(_batch(3))
        converted = _converted(layer, group)
        assert torch.equal(converted(_batch(3)), expected)
        untracked = _layer(track_running_stats=False).eval()
        expected = untracked(_batch(3))
        assert torch.equal(_converted(untracked, group)(_batch(3)), expected)
        assert group.reductions == 0

    on_ranks(2, run)


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    def run(group: ThreadGroup, part: torch.Tensor) -> None:
        layer = _converted(_layer("1d"), group)
        with pytest.raises(ConfigError, match="more than one value per channel"):
            layer(part)

    on_ranks(2, run, _batch(1, "1d").split([0, 1]))


def test_ranks_in_different_layers_are_named() -> None:
    def run(group: ThreadGroup) -> None:
        model = nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)).double()
        _converted(model, group)
        with pytest.raises(ProtocolError, match="is in another layer than"):
            model[group.rank](_batch(4, "1d"))

    on_ranks(2, run)


def test_where_the_small_messages_device_has_no_doubles_they_are_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {torch.device("cpu"): torch.float32}
    monkeypatch.setattr(norm_scope, "widest_float", kinds.get)

    def run(group: ThreadGroup, part: torch.Tensor) -> torch.Tensor:
        model = _converted(nn.Sequential(_layer("1d")), group)
        out: torch.Tensor = model(part)
        assert {each.dtype for each in norm_sums(model)} == {torch.float32}
        return out

    batch = _batch(8, "1d")
    found = torch.cat(on_ranks(2, run, batch.split([5, 3])))
    torch.testing.assert_close(found, _layer("1d")(batch), rtol=1e-5, atol=1e-5)


def norm_sums(model: nn.Module) -> list[torch.Tensor]:
    """The messages of a model's layers."""
    exchanges = model[0].scope._exchanges.values()  # type: ignore[index, union-attr]
    return [each.contribution(0) for each in exchanges]


def test_a_rank_that_does_not_come_is_an_error_that_names_the_layer() -> None:
    def run(group: ThreadGroup) -> None:
        model = _converted(nn.Sequential(_layer("1d")), group)
        if group.rank == 0:
            with pytest.raises(CommunicationError, match="SyncBatchNorm '0'"):
                model(_batch(4, "1d"))

    on_ranks(2, run, deadline_s=0.2)


def test_gradients_of_gradients_are_refused() -> None:
    def run(group: ThreadGroup, part: torch.Tensor) -> None:
        layer = _converted(_layer("1d"), group)
        x = part.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    on_ranks(2, run, _batch(6, "1d").split([2, 4]))


def test_conversion_keeps_what_the_model_has() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, C, 1),
        nn.BatchNorm2d(C, eps=0.1, momentum=None),
        nn.Sequential(nn.BatchNorm2d(C, affine=False), nn.Dropout()),
        nn.InstanceNorm2d(C),
        nn.SyncBatchNorm(C, track_running_stats=False),
    ).double()
    shared = nn.BatchNorm2d(C)
    model.add_module("one", shared)
    model.add_module("other", shared)
    model[2].eval()
    model[1].weight.requires_grad_(False)
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    assert convert_sync_batchnorm(model) is model
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(sync_batchnorm_layers(model)) == ["1", "2.0", "4", "one"]
    assert model.one is model.other
    assert isinstance(model[3], nn.InstanceNorm2d)
    assert (model[1].eps, model[1].momentum) == (0.1, None)
    assert not model[1].weight.requires_grad
    assert (model[1].training, model[2][0].training) == (True, False)
    model[1](_batch(2))
    assert calls == ["hook"]


def test_lazy_layers_are_refused_until_they_know_their_size() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d()).double()
    with pytest.raises(ConfigError, match="0 is lazy and does not know its channels"):
        convert_sync_batchnorm(model)
    model(_batch(4, "1d"))
    assert isinstance(convert_sync_batchnorm(model)[0], SyncBatchNorm)


def test_copies_share_the_scope_and_pickles_have_none() -> None:
    def run(group: ThreadGroup) -> None:
        model = _converted(nn.Sequential(nn.BatchNorm1d(C)), group)
        assert copy.deepcopy(model)[0].spans_ranks
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert not loaded[0].spans_ranks
        loaded(torch.randn(4, C))

    on_ranks(2, run)


def test_bad_input() -> None:
    def run(group: ThreadGroup) -> None:
        layer = _converted(_layer("1d"), group)
        with pytest.raises(ConfigError, match="at least 2 dimensions, got 1"):
            layer(torch.ones(C).double())

    on_ranks(2, run)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="expected a loss weight of at least 0"):
            NormScope().weigh(wrong)
