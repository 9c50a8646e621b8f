"""A window's gradient is that of one process on the union of all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.transport import exchange
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ConfigError
from tests.comm.bus import Bus
from tests.comm.thread_group import on_ranks

Batches = Sequence[int]


class Net(nn.Module):
    """A layer that all use, one that large batches use, and one that nobody uses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(3, 2)
        self.large = nn.Linear(3, 2)
        self.never = nn.Parameter(torch.ones(2))
        self.to(dtype)

    def loss(self, samples: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 3, generator=generator).to(self.body.weight.dtype)
        out = self.body(x)
        if samples >= 4:
            out = out + self.large(x)
        mean: torch.Tensor = out.square().sum(1).mean()
        return mean


def on_one(batches: Sequence[Batches], model: Net) -> list[torch.Tensor | None]:
    """The gradient of the mean over all samples of all ranks, in one process."""
    total = sum(map(sum, batches))
    loss = torch.zeros((), dtype=model.body.weight.dtype)
    for rank, sizes in enumerate(batches):
        for number, samples in enumerate(sizes):
            loss = loss + model.loss(samples, 100 * rank + number) * (samples / total)
    model.zero_grad()
    if total:
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def run(window: GradientWindow, model: Net, rank: int, batches: Batches) -> None:
    """One rank's part of a window, in a loop as users write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number, samples in enumerate(batches):
        optimizer.zero_grad()
        model.loss(samples, 100 * rank + number).backward()
        window.add(samples)
        optimizer.step()
    assert all(
        torch.equal(old, new)
        for old, new in zip(before, model.parameters(), strict=True)
    )


def reduce_all(windows: Sequence[GradientWindow]) -> list[float]:
    """Reduces on a bus: all ranks send before the first one waits."""
    for window in windows:
        window.begin()
    return [window.finish() for window in windows]


def made(model: nn.Module, group: Group) -> GradientWindow:
    return GradientWindow(list(model.parameters()), group)


def relative(
    found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> float:
    """Relative L2 difference of gradients."""
    pairs = [
        (a.double(), b.double())
        for a, b in zip(found, expected, strict=True)
        if a is not None and b is not None
    ]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return math.sqrt(apart / size) if pairs else 0.0


def assert_equal(
    model: nn.Module, expected: list[torch.Tensor | None], bound: float
) -> None:
    found = [parameter.grad for parameter in model.parameters()]
    assert [g is None for g in found] == [g is None for g in expected]
    assert relative(found, expected) <= bound


sizes = st.lists(st.integers(1, 6), max_size=3)


@settings(max_examples=25)
@given(
    st.lists(st.lists(sizes, min_size=3, max_size=3), min_size=1, max_size=3),
    st.sampled_from([(torch.float64, 1e-13), (torch.float32, 1e-6)]),
)
def test_any_division_gives_the_gradient_of_the_union(
    script: list[list[Batches]], precision: tuple[torch.dtype, float]
) -> None:
    dtype, bound = precision
    bus = Bus(3)
    models = [Net(dtype) for _ in range(3)]
    windows = [made(model, bus.group(rank)) for rank, model in enumerate(models)]
    for batches in script:
        for rank, window in enumerate(windows):
            run(window, models[rank], rank, batches[rank])
            assert window.samples == sum(batches[rank])
        total = sum(map(sum, batches))
        assert reduce_all(windows) == [total] * 3
        expected = on_one(batches, Net(dtype))
        for model, window in zip(models, windows, strict=True):
            assert_equal(model, expected, bound)
            window.clear()
            assert all(parameter.grad is None for parameter in model.parameters())


def test_half_precision_is_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    window = GradientWindow([parameter], Bus(1).group(0))
    for _ in range(512):
        parameter.grad = torch.full_like(parameter, 1.0)
        window.add(1)
    assert reduce_all([window]) == [512]
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.item() == 1.0


def test_unlike_dtypes_share_a_message() -> None:
    kinds = torch.bfloat16, torch.float64, torch.complex64
    parameters = [nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds]
    window = GradientWindow(parameters, Bus(1).group(0))
    values = [torch.tensor([1.0, -2.5]).to(kind) for kind in kinds]
    values[2] += 3j
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    window.add(4)
    assert reduce_all([window]) == [4]
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype is value.dtype
        assert torch.equal(parameter.grad, value)


def test_a_batch_without_samples_leaves_no_trace() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    window = GradientWindow([parameter], Bus(1).group(0))
    parameter.grad = torch.full((2,), float("nan"))
    window.add(0)
    assert parameter.grad is None
    assert reduce_all([window]) == [0.0]
    assert parameter.grad is None


def test_what_is_no_number_on_one_rank_counts_nowhere() -> None:
    bus = Bus(2)
    models = [Net() for _ in range(2)]
    windows = [made(model, bus.group(rank)) for rank, model in enumerate(models)]
    for poison in (float("nan"), float("inf")):
        run(windows[0], models[0], 0, [3, 2])
        (models[1].loss(4, 100) * poison).backward()
        windows[1].add(4)
        run(windows[1], models[1], 1, [2])
        assert [window.is_finite for window in windows] == [True, False]
        windows[0].begin()
        windows[1].begin(counts=windows[1].is_finite)
        assert [window.finish() for window in windows] == [5, 5]
        for model, window in zip(models, windows, strict=True):
            assert_equal(model, on_one([[3, 2]], Net()), 1e-13)
            window.clear()
            assert window.is_finite  # of the window to come


def test_a_failed_reduction_is_redone_with_those_who_are_left() -> None:
    bus = Bus(2)
    model = Net()
    window = made(model, bus.group(0))
    run(window, model, 0, [3, 2])
    window.begin()
    with pytest.raises(CommunicationError, match="gradients of a window failed on ran"):
        window.finish()
    assert all(parameter.grad is None for parameter in model.parameters())
    window.connect(Bus(1).group(0))
    assert reduce_all([window]) == [5]
    assert_equal(model, on_one([[3, 2]], Net()), 1e-13)
    run(window, model, 0, [4])
    window.skip()  # the step was copied from another rank
    run(window, model, 0, [3, 2])
    assert reduce_all([window]) == [5]


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf")])
def test_samples_that_cannot_be_are_refused(samples: float) -> None:
    window = GradientWindow([nn.Parameter(torch.zeros(2))], Bus(1).group(0))
    with pytest.raises(ConfigError, match="expected at least 0 samples"):
        window.add(samples)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        GradientWindow([], Bus(1).group(0))


def test_the_memory_of_shared_sums_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEAST_BYTES", 0)

    def counted(group: Group) -> int:
        return GradientWindow([nn.Parameter(torch.zeros(10))], group).extra_bytes

    # Sums, message and result of 40 bytes; a quarter of a message of 48 bytes.
    assert on_ranks(4, counted, shares_host=True) == [132] * 4


def test_a_mean_lies_in_memory_as_its_parameter_does() -> None:
    """Fused optimizers read both as if they did."""
    layer = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    window = made(layer, Bus(1).group(0))
    layer(torch.randn(2, 3, 4, 4)).square().mean().backward()
    own = layer.weight.grad.clone()
    window.add(2)
    reduce_all([window])
    assert layer.weight.grad.stride() == layer.weight.stride()
    torch.testing.assert_close(layer.weight.grad, own)
