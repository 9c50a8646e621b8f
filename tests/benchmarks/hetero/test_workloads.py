"""Workloads: sizes, determinism, and that they learn."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from benchmarks.hetero.workloads import WORKLOADS, batch_size_of, build_workload
from elche.demo.workload import (
    GPT,
    GPTConfig,
    Workload,
    hash_ngrams,
    learning_rate_scale,
)
from elche.errors import ConfigError

LARGE = "gpt-10m"


@pytest.fixture(scope="module", params=[name for name in WORKLOADS if name != LARGE])
def workload(request: pytest.FixtureRequest) -> Workload:
    return build_workload(request.param, seed=3, num_samples=32 * 24)


def train(workload: Workload) -> torch.nn.Module:
    model = workload.model_fn()
    optimizer = workload.optimizer_fn(model.parameters())
    size = batch_size_of(workload.name)
    for batch in DataLoader(workload.train_dataset, batch_size=size):
        workload.loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_loss_falls(workload: Workload) -> None:
    before = workload.evaluate(workload.model_fn())
    assert workload.evaluate(train(workload)) < 0.95 * before


def test_benchmark_models_are_worth_reducing(workload: Workload) -> None:
    numel = sum(p.numel() for p in workload.model_fn().parameters())
    if workload.name == "gpt-small":
        assert 100_000 < numel < 200_000
    else:
        assert 2_000_000 < numel < 3_000_000


def test_the_workload_for_slow_links_is_large_and_learns() -> None:
    workload = build_workload(LARGE, seed=3, num_samples=64)
    before = workload.evaluate(workload.model_fn())
    model = train(workload)
    assert 9_500_000 < sum(p.numel() for p in model.parameters()) < 10_500_000
    assert workload.evaluate(model) < 0.95 * before


def test_everything_follows_from_the_seed(workload: Workload) -> None:
    again = build_workload(workload.name, seed=3, num_samples=32 * 24)
    for index in (0, 5, 32 * 24 - 1):
        for one, other in zip(
            workload.train_dataset[index], again.train_dataset[index], strict=True
        ):
            assert torch.equal(one, other)
    state = again.model_fn().state_dict()
    for name, value in workload.model_fn().state_dict().items():
        assert torch.equal(value, state[name])


def test_the_held_out_set_is_the_same_for_every_seed(workload: Workload) -> None:
    other = build_workload(workload.name, seed=4, num_samples=64)
    for one, two in zip(workload.eval_batches, other.eval_batches, strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
    ours = next(iter(workload.model_fn().parameters()))
    assert not torch.equal(ours, next(iter(other.model_fn().parameters())))


def test_building_a_model_keeps_the_global_random_state(workload: Workload) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    workload.model_fn()
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_leaves_the_model_in_training(workload: Workload) -> None:
    model = workload.model_fn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workload.evaluate(model)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_workload_travels_to_a_spawned_process() -> None:
    workload = build_workload("mlp", num_samples=4)
    copy = pickle.loads(pickle.dumps(workload))
    assert copy.evaluate(copy.model_fn()) == workload.evaluate(workload.model_fn())


def test_own_text_is_used(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("to be or not to be, " * 1000)
    workload = build_workload("gpt-small", num_samples=8, text=path)
    assert workload.source == str(path)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown model 'resnet'; choose one of"):
        build_workload("resnet")
    with pytest.raises(ConfigError, match="num_samples must be at least 1, got 0"):
        build_workload("mlp", num_samples=0)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match="do not fit into a text of"):
        build_workload("gpt", text=tmp_path / "short.txt")


def test_learning_rate_warms_up_and_decays() -> None:
    assert learning_rate_scale(0.025) == pytest.approx(0.5)
    assert learning_rate_scale(0.5) == pytest.approx(0.5)
    assert learning_rate_scale(0.0) == learning_rate_scale(1.0) == 0.02


def test_the_gpt_does_not_see_the_future() -> None:
    model = GPT(GPTConfig(vocabulary=7, ngram_orders=(2, 3), ngram_rows=32))
    symbols = torch.randint(7, (2, 8))
    changed = symbols.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 7
    before, after = model(symbols), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


@given(st.integers(0, 2**31 - 1), st.integers(1, 6), st.integers(1, 5000))
def test_ngram_rows_depend_on_the_ngram_alone(seed: int, order: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(97, (1, 8), generator=generator)
    shifted = torch.cat([torch.randint(97, (1, 3), generator=generator), symbols], 1)
    (bucket,) = hash_ngrams(symbols, (order,), rows)
    (moved,) = hash_ngrams(shifted, (order,), rows)
    assert ((bucket >= 0) & (bucket < rows)).all()
    assert torch.equal(bucket[:, order - 1 :], moved[:, 3 + order - 1 :])


def test_ngrams_spread_over_their_table() -> None:
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    first, second = hash_ngrams(pairs, (2, 2), 4096)
    for bucket in (first, second):
        assert bucket[:, 1].unique().numel() > 0.5 * 4096
    assert (first[:, 1] == second[:, 1]).float().mean() < 0.01
