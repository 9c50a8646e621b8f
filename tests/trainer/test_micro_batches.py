"""Batches in micro-batches: the same gradient, and nothing left of a failed attempt."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.emulation import EmulationConfig, emulate
from elche.runtime.memory_limits import check_caps, memory_hint
from elche.runtime.training import Training
from elche.trainer.micro_batches import MicroBatches, cut_batch

CPU = torch.device("cpu")
OutOfMemory = torch.cuda.OutOfMemoryError


class Host:
    """Notes what a run would be told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.worker = self

    def hold(self, holds: bool) -> None:
        self.told.append(holds)

    def rewind(self) -> None:
        self.told.append("rewind")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_samples":
            self.told.append(value)
        super().__setattr__(name, value)


class Bounded:
    """A loss that runs out of memory above a number of samples."""

    def __init__(self, model: nn.Module, most: int, *, is_sum: bool = False) -> None:
        self.model, self.most = model, most
        self.reduction = "sum" if is_sum else "mean"
        self.sizes: list[int] = []
        self.failures = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.sizes.append(len(x))
        out = self.model(x)
        if len(x) > self.most:
            self.failures += 1
            raise OutOfMemory(f"no room for {len(x)}")
        return F.cross_entropy(out, y, reduction=self.reduction)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=draw)


def parts_of(
    model: nn.Module,
    host: Host | None = None,
    on_part: Callable[[float], None] = lambda part: None,
    **options: Any,
) -> MicroBatches:
    given: dict[str, Any] = {"max_samples": None, "least_samples": 1, "is_sum": False}
    given = {**given, "weights": None, "host": host, "on_part": on_part, **options}
    return MicroBatches(model, CPU, **given)


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


@given(samples=st.integers(2, 40), most=st.integers(1, 40), is_sum=st.booleans())
def test_the_gradient_is_that_of_the_whole_batch(
    samples: int, most: int, is_sum: bool
) -> None:
    model, whole = network(), network()
    loss_of = Bounded(model, most, is_sum=is_sum)
    told = Host()
    parts = parts_of(model, told, is_sum=is_sum)
    batch = batch_of(samples)
    loss = parts.backward(batch, samples, loss_of)
    expected = Bounded(whole, samples, is_sum=is_sum)(batch)
    expected.backward()
    assert float(loss - expected.detach()) == pytest.approx(0.0, abs=1e-12)
    difference = gradient(model) - gradient(whole)
    assert float(difference.norm() / gradient(whole).norm()) <= 1e-12
    assert not loss.requires_grad
    assert (loss_of.failures > 0) == (samples > most)
    if samples > most:
        cap = parts.max_samples
        assert cap is not None
        assert most / 2 < cap <= most
        count = -(-samples // cap)
        assert sum(loss_of.sizes[-count:]) == samples
        assert max(loss_of.sizes[-count:]) - min(loss_of.sizes[-count:]) <= 1
        assert told.told.count("rewind") == loss_of.failures
        assert told.told[-count - 1 :] == [True] * (count - 1) + [False, False]
    else:
        assert parts.max_samples is None
        assert told.told == []


@given(samples=st.integers(2, 40), most=st.integers(1, 40))
def test_parts_weigh_what_they_are_said_to(samples: int, most: int) -> None:
    """By their labels; where some of a batch counts, parts of labels 0 are not run."""
    model, whole = network(), network()
    x, y = batch_of(samples)
    y[: samples // 2] = 0
    by_label = torch.arange(3).double()
    said: list[float] = []

    def loss_of(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]), part[1], weight=by_label)

    weights = BatchWeights(lambda part: part[1].sum(), 0)
    parts = parts_of(model, None, said.append, max_samples=most, weights=weights)
    loss = parts.backward((x, y), samples, loss_of)
    expected = F.cross_entropy(whole(x), y, weight=by_label)
    expected.backward()
    if not int(y.sum()):
        return
    assert float(loss - expected.detach()) == pytest.approx(0.0, abs=1e-12)
    difference = gradient(model) - gradient(whole)
    assert float(difference.norm() / gradient(whole).norm()) <= 1e-12
    if samples > most:
        assert sum(said[:-1]) == pytest.approx(1.0)
        assert 0.0 not in said
        assert said[-1] == 1.0


def test_out_of_memory_is_met_once(caplog: pytest.LogCaptureFixture) -> None:
    model, host = network(), Host()
    loss_of, parts = Bounded(model, 20), parts_of(model, host)
    with caplog.at_level(logging.WARNING, "elche"):
        for _ in range(3):
            model.zero_grad()
            parts.backward(batch_of(32), 32, loss_of)
    assert loss_of.sizes == [32, 16, 16, 16, 16, 16, 16]
    assert [told for told in host.told if told not in (True, False)] == [16, "rewind"]
    (line,) = caplog.messages
    assert line.startswith("32 samples do not fit cpu; it gets at most 16 at once")


class _FailsOnce(torch.autograd.Function):
    """Runs out of memory in its first backward pass."""

    fired = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if len(gradient) > 4:
            _FailsOnce.fired += 1
            raise OutOfMemory("in backward")
        return gradient


def test_half_a_backward_pass_leaves_nothing() -> None:
    """The second layer had its gradients when the first one's failed."""
    model, whole, _FailsOnce.fired = network(), network(), 0
    batch = batch_of(8)

    def loss_of(part: Any) -> torch.Tensor:
        hidden = _FailsOnce.apply(model[1](model[0](part[0])))
        loss: torch.Tensor = F.cross_entropy(model[2](hidden), part[1])
        return loss

    parts_of(model).backward(batch, 8, loss_of)
    Bounded(whole, 8)(batch).backward()
    assert _FailsOnce.fired == 1
    difference = gradient(model) - gradient(whole)
    assert float(difference.norm() / gradient(whole).norm()) <= 1e-12


def test_statistics_and_masks_are_those_of_a_known_cap() -> None:
    """A failed attempt draws no number and tracks no batch."""
    states, drawn = [], []
    for known in (None, 8):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        model.register_buffer("table", torch.zeros(3))
        model.append(nn.Linear(6, 3)).double()
        loss_of = Bounded(model, 8)
        parts = parts_of(model, least_samples=2, max_samples=known)
        for _ in range(2):
            model.zero_grad()
            parts.backward(batch_of(16), 16, loss_of)
        assert loss_of.failures == (known is None)
        assert parts.max_samples == 8
        states.append({**model.state_dict(), "gradient": gradient(model)})
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert int(states[0]["1.num_batches_tracked"]) == 4
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


def test_an_emulated_device_has_so_much_memory_in_training() -> None:
    model = network()
    emulate(model, EmulationConfig(speed=1e3, memory_samples=4))
    x, _ = batch_of(5)
    with pytest.raises(OutOfMemory, match="emulated device holds 4 samples, not 5"):
        model(x)
    model(x[:4])
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


def test_a_batch_is_cut_through_whatever_holds_it() -> None:
    x = torch.arange(6).reshape(3, 2)
    batch = {
        "pair": Pair(x, ["a", "b", "c"]),
        "rows": [(1, "p"), (2, "q"), (3, "r")],
        "more": UserDict({"mask": x > 2, "scale": torch.tensor(2.0)}),
        "all": ("text", 5, None),
        "two": [x, x + 1],
    }
    part = cut_batch(batch, 1, 3, 3)
    assert torch.equal(part["pair"].x, x[1:])
    assert part["pair"].names == ["b", "c"]
    assert part["rows"] == [(2, "q"), (3, "r")]
    assert torch.equal(part["more"]["mask"], (x > 2)[1:])
    assert float(part["more"]["scale"]) == 2.0
    assert torch.equal(part["two"][1], (x + 1)[1:])
    assert len(batch["more"]["mask"]) == 3
    assert part["all"] == (5, None)  # as long as the batch, so one thing per sample


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"to have 4 samples .*, got \[3\]"),
        ((torch.zeros(4, 2), object()), "in tuples, lists or dicts, got object"),
    ],
)
def test_what_cannot_be_cut_ends_the_run_with_what_to_do(
    batch: Any, message: str
) -> None:
    model = network()

    def loss_of(part: Any) -> torch.Tensor:
        raise OutOfMemory("full")

    with pytest.raises(ConfigError, match=message) as raised:
        parts_of(model).backward(batch, 4, loss_of)
    assert "4 samples do not fit the device (full)" in str(raised.value)
    assert "lower batch_size" in str(raised.value)


def test_a_batch_whose_first_dimension_is_not_samples_is_not_cut() -> None:
    model = network()
    parts = parts_of(model, max_samples=3)
    sequence_first = (torch.zeros(7, 2, 5, dtype=torch.float64), torch.zeros(7).long())
    seen = []

    def loss_of(part: Any) -> torch.Tensor:
        seen.append(len(part[0]))
        loss: torch.Tensor = model(part[0]).mean()
        return loss

    parts.backward(sequence_first, 2, loss_of)
    assert seen == [7]


@pytest.mark.parametrize(("least", "smallest"), [(1, 1), (2, 3)])
def test_a_device_without_room_for_the_least_micro_batch_is_named(
    least: int, smallest: int
) -> None:
    model = network()
    loss_of = Bounded(model, 0)
    message = f"fewer than {smallest} at once are not possible"
    with pytest.raises(ConfigError, match=message):
        parts_of(model, least_samples=least).backward(batch_of(16), 16, loss_of)
    assert loss_of.sizes == [16, 8, 6, 4, 3, *([2, 1] if least == 1 else [])]


def test_a_cap_below_what_the_model_trains_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected max_samples of at least 3"):
        parts_of(network(), max_samples=2, least_samples=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_samples": {2: 5}}, "expected max_samples of ranks below 2, got one for"),
        ({"max_samples": (5, 6)}, "a batch of 16 samples does not fit"),
        (
            {"max_samples": {1: 5}, "policy": "cadence"},
            "rank 1 holds 5 samples at once, but policy 'cadence' uses local "
            r"batches of 8; set windows=elche.WindowConfig\(local_batch_size=5\)",
        ),
        ({"max_samples": {1: 5}, "policy": "auto"}, "choose policy='sync'"),
    ],
)
def test_caps_that_a_run_cannot_keep_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_caps(training_of(options), 2, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_samples": {1: 5}},
        {"max_samples": (5, 6), "micro_batches": True},
        {"max_samples": {1: 16}, "policy": "cadence"},
        {"max_samples": {0: 1}, "policy": "async", "micro_batches": True},
    ],
)
def test_caps_that_a_run_can_keep_are_taken(options: dict[str, Any]) -> None:
    check_caps(training_of(options), 2, 1)


def training_of(options: dict[str, Any]) -> Training:
    """Batches of 16, in several parts if ``micro_batches`` says so."""
    model = nn.Linear(1, 1)
    rest = dict(options)
    return Training(
        micro_batches=rest.pop("micro_batches", False),
        config=RunConfig(**rest),
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        loader=DataLoader(TensorDataset(torch.zeros(32, 1)), batch_size=16),
    )


def test_caps_are_named_by_rank_or_in_order() -> None:
    assert RunConfig(max_samples={2: 8}).caps == (None, None, 8)
    assert RunConfig(max_samples=[4, None]).caps == (4, None)
    assert RunConfig(max_samples={1: 8}).cap_of(1) == 8
    assert RunConfig().cap_of(3) is None
    for wrong, message in [
        ({"max_samples": 5}, "expected max_samples to be {rank: samples}"),
        ({"max_samples": {"a": 5}}, "expected a rank in max_samples to be an int"),
        ({"max_samples": (0,)}, r"expected max_samples\[0\] to be an int >= 1"),
        ({"micro_batches": True}, "micro_batches= was removed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RunConfig(**wrong)  # type: ignore[arg-type]


def test_the_hint_names_the_setting() -> None:
    hint = memory_hint(OutOfMemory("full"), 3, 40)
    assert "max_samples={3: 20}" in hint
    assert memory_hint(RuntimeError("other"), 3, 40) == ""
    assert memory_hint(OutOfMemory("full"), 3, 1) == ""
