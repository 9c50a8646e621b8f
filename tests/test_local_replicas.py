"""Several replicas in one process train as one device does."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from elche import local_replicas
from elche.errors import ConfigError, DeadlineError
from elche.local_replicas import LocalReplicas, split_exactly
from tests.distributed.weight_cases import (
    Padded,
    masked_mean,
    network,
    token_sum,
    tokens_of,
)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _batches(*sizes: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return [
        {
            "x": torch.randn(size, 4, generator=generator).double(),
            "y": torch.randint(3, (size,), generator=generator),
        }
        for size in sizes
    ]


@pytest.mark.parametrize("shares", [None, (3, 1, 1), (1, 0, 2)], ids=str)
def test_steps_are_those_of_one_device(shares: tuple[float, ...] | None) -> None:
    model, plain = _model(), _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    with LocalReplicas(model, ["cpu"] * 3, shares=shares) as replicas:
        assert replicas.replicas[0] is model
        for batch in _batches(7, 8, 1, 2, 5):
            loss = replicas.train_step(batch, _loss, optimizer)
            expected = _loss(plain, batch)
            expected.backward()
            reference.step()
            reference.zero_grad()
            torch.testing.assert_close(loss, expected.detach())
            for replica in replicas.replicas:
                for ours, theirs in zip(
                    replica.parameters(), plain.parameters(), strict=True
                ):
                    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
            states = [replica.state_dict() for replica in replicas.replicas]
            for name, value in states[0].items():
                assert all(torch.equal(value, state[name]) for state in states)


@pytest.mark.parametrize("shares", [None, (3, 1, 1), (1, 0, 2)], ids=str)
def test_parts_weigh_what_they_are_said_to(shares: tuple[float, ...] | None) -> None:
    """By their labels; the part of labels 0 alone is not run, nor a batch of these."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert int(batch["y"].sum()) > 0
        weights = torch.arange(3).double()
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weights)

    model, plain = _model(), _model()
    batches = _batches(7, 8, 5)
    batches[1]["y"][:3] = 0
    with LocalReplicas(
        model, ["cpu"] * 3, shares=shares, weight_of=lambda batch: batch["y"].sum()
    ) as replicas:
        for batch in batches:
            mean, expected = replicas.backward(batch, loss), loss(plain, batch)
            expected.backward()
            torch.testing.assert_close(mean, expected.detach(), rtol=1e-13, atol=0.0)
        nothing = {"x": batches[0]["x"], "y": torch.zeros(7, dtype=torch.int64)}
        assert float(replicas.backward(nothing, loss)) == 0.0
        with pytest.raises(ConfigError, match="gave -1 for samples 0 to"):
            LocalReplicas(model, ["cpu"], weight_of=lambda _: -1).backward(
                nothing, loss
            )
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_steps_on_padded_sequences_are_those_of_one_device() -> None:
    """With numpy's count of tokens; some parts, and one batch, are padding alone."""
    data = Padded(60)
    model, plain = network(), network()
    ours, theirs = (
        torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain)
    )
    batches = list(DataLoader(data, 4, shuffle=False))
    assert [int(tokens_of(batch)) for batch in batches].count(0) == 1
    with LocalReplicas(
        model, ["cpu"] * 2, weight_of=lambda batch: tokens_of(batch).numpy().sum()
    ) as replicas:
        for batch in batches:
            loss = replicas.train_step(batch, masked_mean, ours)
            expected = token_sum(plain, batch) / max(1, int(tokens_of(batch)))
            expected.backward()
            if int(tokens_of(batch)):
                theirs.step()
            theirs.zero_grad()
            assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_gradients_accumulate_as_in_one_backward_after_the_other() -> None:
    model, plain = _model(), _model()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        for batch in _batches(5, 6):
            replicas.backward(batch, _loss)
            _loss(plain, batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_replicas_run_at_the_same_time_in_threads_of_their_own() -> None:
    meeting = threading.Barrier(2, timeout=60.0)
    names: set[str] = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        names.add(threading.current_thread().name)
        meeting.wait()
        return _loss(model, batch)

    with LocalReplicas(_model(), ["cpu", "cpu"]) as replicas:
        replicas.backward(_batches(4)[0], loss)
    assert len(names) == 2


def test_modes_of_the_calling_thread_hold_in_the_replicas() -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch)
        seen.append((out.dtype, model.training))
        return out.float().square().mean()

    model = _model().float().eval()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            replicas.backward(torch.randn(4, 4), loss)
        model.train()
        replicas.backward(torch.randn(4, 4), loss)
    assert sorted(seen, key=str) == [
        *[(torch.bfloat16, False)] * 2,
        *[(torch.float32, True)] * 2,
    ]


def test_buffers_are_the_mean_over_replicas_that_had_samples() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 1))
    first, second = torch.randn(3, 2), torch.randn(3, 2) + 4.0
    with LocalReplicas(model, ["cpu"] * 3, shares=(1, 1, 0)) as replicas:
        replicas.backward(torch.cat([first, second]), lambda m, x: m(x).mean())
        replicas.sync_params()
        for replica in replicas.replicas:
            mean = (first.mean(0) + second.mean(0)) / 2
            torch.testing.assert_close(replica[0].running_mean, mean)
            assert int(replica[0].num_batches_tracked) == 1


class _Cached(nn.Module):
    """Statistics, and a cache as long as the longest part that the replica has seen."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=1.0)
        self.out = nn.Linear(2, 1)
        self.register_buffer("cache", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) > len(self.cache):
            self.cache = torch.arange(float(len(x)))
        return self.out(self.norm(x)).squeeze(1) * self.cache[: len(x)]


def test_a_cache_that_grows_is_each_replicas_own() -> None:
    torch.manual_seed(3)
    model = _Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(10, 2)
    with LocalReplicas(model, ["cpu"] * 2, shares=(3, 2)) as replicas:
        for length in (10, 5):
            replicas.train_step(x[:length], lambda m, x: m(x).mean(), optimizer)
            first, second = replicas.replicas
            sizes = [len(first.cache), len(second.cache)]
            assert sizes == ([6, 4] if length == 10 else [6, 6])  # copied in between
            assert torch.equal(first.norm.running_mean, second.norm.running_mean)
            assert torch.equal(first.out.weight, second.out.weight)


class _Registering(nn.Module):
    """A layer that registers what it works with anew in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = torch.full((len(x), 1), 0.5, dtype=x.dtype)
        self.register_buffer("factors", factors, persistent=False)
        out: torch.Tensor = self.out(x * self.factors)
        return out


@pytest.fixture
def copies_made(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Models that were copied whole."""
    made: list[nn.Module] = []
    copied = local_replicas.copied

    def note(model: nn.Module, devices: Any) -> list[nn.Module]:
        made.append(model)
        return copied(model, devices)

    monkeypatch.setattr(local_replicas, "copied", note)
    return made


def test_a_buffer_that_forward_makes_anew_is_not_a_new_model(
    copies_made: list[nn.Module],
) -> None:
    torch.manual_seed(3)
    model = _Registering()
    alone = copy.deepcopy(model)
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    with LocalReplicas(model, ["cpu"] * 2, shares=(2, 1)) as replicas:
        for batch in _batches(6, 9, 3, 1):
            replicas.train_step(batch, _loss, optimizer)
            own.zero_grad()
            _loss(alone, batch).backward()
            own.step()
    assert copies_made == [model]
    torch.testing.assert_close(model.out.weight, alone.out.weight, rtol=0, atol=1e-14)


def test_buffers_that_are_changed_between_steps_are_followed(
    copies_made: list[nn.Module],
) -> None:
    model = _model()
    model.register_buffer("kept", torch.ones(2))
    model[0].register_buffer("tied", model.get_buffer("kept"))
    with LocalReplicas(model, ["cpu"] * 2) as replicas:
        batch, (_, other) = _batches(6)[0], replicas.replicas
        kept = other.get_buffer("kept")
        model[0].register_buffer("added", torch.arange(3), persistent=False)
        replicas.backward(batch, _loss)
        assert torch.equal(other[0].added, torch.arange(3))
        assert "0.added" not in other.state_dict()
        assert other.get_buffer("kept") is kept
        model.kept = model[0].tied = torch.zeros(5)
        del model[0].added
        replicas.backward(batch, _loss)
        assert torch.equal(other.get_buffer("kept"), torch.zeros(5))
        assert other[0].tied is other.get_buffer("kept")
        assert not hasattr(other[0], "added")
        model.kept = None
        replicas.backward(batch, _loss)
        assert other.kept is None
    assert copies_made == [model]


def test_a_model_that_grows_and_freezes_is_followed() -> None:
    model = _model()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        batch = _batches(6)[0]
        replicas.backward(batch, _loss)
        model.append(nn.Linear(3, 3).double())
        model[0].requires_grad_(False)
        model.zero_grad()
        replicas.backward(batch, _loss)
        assert [len(list(r.parameters())) for r in replicas.replicas] == [6, 6]
        assert model[0].weight.grad is None
    expected = copy.deepcopy(model)
    expected.zero_grad()
    _loss(expected, batch).backward()
    torch.testing.assert_close(model[3].weight.grad, expected[3].weight.grad)


def test_an_error_in_one_thread_comes_out_and_leaves_gradients_alone() -> None:
    model = _model()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        batches = _batches(4, 4)
        replicas.backward(batches[0], _loss)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]

        def fails(replica: nn.Module, batch: Any) -> torch.Tensor:
            if replica is not model:
                raise ValueError("a fault in the loss")
            return _loss(replica, batch)

        with pytest.raises(ValueError, match="a fault in the loss"):
            replicas.backward(batches[1], fails)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
        replicas.backward(batches[1], _loss)


def test_a_thread_that_hangs_is_named() -> None:
    release = threading.Event()

    def hangs(model: nn.Module, batch: Any) -> torch.Tensor:
        if model is replicas.replicas[1]:
            assert release.wait(60.0)
        return _loss(model, batch)

    replicas = LocalReplicas(_model(), ["cpu", "cpu"], timeout_s=0.3)
    # On a busy machine the other one may be late as well.
    with pytest.raises(DeadlineError, match=r"replicas \[(0, )?1\] \(on cpu.* did not"):
        replicas.backward(_batches(4)[0], hangs)
    release.set()
    replicas.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": []}, "expected at least one device, got none"),
        ({"devices": ["abacus"]}, "unknown device 'abacus'"),
        ({"devices": ["cpu"], "shares": [1, 1]}, r"a share per device \(1\), got 2"),
        ({"devices": ["cpu"], "shares": [0]}, "expected shares of at least 0 with a"),
        ({"devices": ["cpu"] * 2, "shares": [-1, 2]}, "expected shares of at least 0"),
        ({"devices": ["cpu"], "timeout_s": 0}, "expected a positive timeout_s, got 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LocalReplicas(_model(), **arguments)


def test_wrong_batches_losses_and_optimizers() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        with pytest.raises(ConfigError, match="the batch is empty"):
            replicas.train_step(torch.ones(0, 4).double(), _loss, optimizer)
        with pytest.raises(ConfigError, match=r"to have 4 samples .* got \[3\]"):
            replicas.backward({"x": torch.ones(4, 4), "y": torch.ones(3)}, _loss)
        with pytest.raises(ConfigError, match=r"to return a scalar .* got \[2, 3\]"):
            replicas.backward(torch.ones(4, 4).double(), lambda m, x: m(x))
        stranger = torch.optim.SGD(_model().parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="holds none of the model's parameters"):
            replicas.train_step(_batches(4)[0], _loss, stranger)


class _Odd(nn.Module):
    """Holds what cannot be copied: the result of a computation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3).double()
        self.kept = self.inner.weight * 2.0


def test_models_that_cannot_be_copied_are_refused() -> None:
    for model in (nn.LazyLinear(3), nn.Linear(4, 3, device="meta")):
        with pytest.raises(ConfigError, match=r"weight has no values yet"):
            LocalReplicas(model, ["cpu", "cpu"])
    odd = _Odd()
    odd.inner.weight.grad = torch.ones(3, 4).double()
    with pytest.raises(ConfigError, match=r"the model cannot be copied to cpu: "):
        LocalReplicas(odd, ["cpu", "cpu"])
    assert odd.inner.weight.grad is not None
    with pytest.raises(ConfigError, match=r"expected a list of devices, got 'cpu'"):
        LocalReplicas(_model(), "cpu")


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (nn.CrossEntropyLoss(), r"a function of a replica and its part .* Cross"),
        (None, r"a function of a replica and its part .* got None"),
        (lambda model, x, y: x, r"to take two arguments.*missing a required arg.*'y'"),
        (lambda batch: batch, r"to take two arguments.*too many positional"),
        (lambda m, b: _loss(m, b).item(), r"a scalar tensor of real numbers, got \d"),
        (lambda m, b: _loss(m, b).to(torch.complex64), r"got \[\] of torch.complex64"),
        (lambda m, b: _loss(m, b).detach(), r"the loss has no graph"),
    ],
)
def test_losses_that_cannot_be_trained_on_are_refused(loss_fn: Any, says: str) -> None:
    with LocalReplicas(_model(), ["cpu", "cpu"]) as replicas:
        with pytest.raises(ConfigError, match=says):
            replicas.backward(_batches(4)[0], loss_fn)
        replicas.backward(_batches(4)[0], _loss)


def test_a_loss_of_another_model_is_refused() -> None:
    model, other = _model(), _model()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        with pytest.raises(ConfigError, match=r"got no gradient from its loss"):
            replicas.backward(_batches(4)[0], lambda m, b: _loss(other, b))
        with pytest.raises(ConfigError, match=r"got no gradient from its loss"):
            replicas.backward(_batches(4)[0], lambda m, b: _loss(model, b))
        assert all(parameter.grad is None for parameter in model.parameters())
        model.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"no graph.*leave parameters unfrozen"):
            replicas.backward(_batches(4)[0], _loss)


def test_an_optimizer_with_a_closure_steps_with_one() -> None:
    model, plain = _model(), _model()
    batch = _batches(6)[0]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    reference = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=3)

    def alone() -> torch.Tensor:
        reference.zero_grad()
        loss = _loss(plain, batch)
        loss.backward()
        return loss

    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        with pytest.raises(ConfigError, match=r"LBFGS computes .*step\(closure\)"):
            replicas.train_step(batch, _loss, optimizer)
        wrong: Any = object()
        with pytest.raises(ConfigError, match=r"a torch\.optim\.Optimizer, got object"):
            replicas.train_step(batch, _loss, wrong)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return replicas.backward(batch, _loss)

        optimizer.step(closure)
    reference.step(alone)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("index", [0, 1])
def test_a_replica_that_was_moved_is_refused(index: int) -> None:
    with LocalReplicas(_model(), ["cpu", "cpu"]) as replicas:
        weight: Any = replicas.replicas[index][0]
        weight._parameters["weight"] = nn.Parameter(
            torch.empty(8, 4, device="meta", dtype=torch.float64)
        )
        says = rf"replica {index} is expected on cpu, and its 0.weight is on meta"
        with pytest.raises(ConfigError, match=says if index else "has no values yet"):
            replicas.backward(_batches(4)[0], _loss)


def test_copies_follow_the_mode_and_the_type_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    with LocalReplicas(model, ["cpu", "cpu"]) as replicas:
        batch = _batches(6)[0]
        model.eval()
        replicas.replicas[1].train()
        first = replicas.backward(batch, _loss)
        assert torch.equal(first, replicas.backward(batch, _loss))
        model.append(nn.Identity())
        replicas.backward(batch, _loss)
        assert [len(list(r.modules())) for r in replicas.replicas] == [4, 4]
        model.float()
        batch["x"] = batch["x"].float()
        model.zero_grad()
        replicas.backward(batch, _loss)
        assert {p.dtype for r in replicas.replicas for p in r.parameters()} == {
            torch.float32
        }


@given(
    total=st.integers(0, 1000),
    weights=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8).filter(
        lambda weights: sum(weights) > 0.1
    ),
)
def test_split_is_exact_and_nearest(total: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = split_exactly(total, shares)
    assert sum(counts) == total
    assert all(
        abs(count - total * share) < 1.0 + 1e-6
        for count, share in zip(counts, shares, strict=True)
    )
