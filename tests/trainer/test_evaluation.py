"""`evaluate` and `predict`: exact means and the original order, whoever did what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import elche
from elche.errors import ConfigError
from elche.trainer.evaluation import batches_of
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_pool import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("plain_environment")]

X = torch.linspace(-3.0, 5.0, 23, dtype=torch.float64)[:, None]
DATA = TensorDataset(X, X.square())


def over(length: int, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(X[:length], X[:length].square())
    return DataLoader(data, **{"batch_size": 4, **options})


def worth(batch: Any) -> dict[str, Any]:
    x, y = batch
    return {"mse": (x - y).square().mean(), "first": float(x[0])}


def weigh(batch: Any) -> torch.Tensor:
    total: torch.Tensor = batch[1].sum()
    return total


def rows(batch: Any) -> Any:
    x, y = batch
    return {"sum": x + y, "parts": (x[:, 0], [y.round().long()])}


def found(lengths: tuple[int, ...]) -> list[Any]:
    """What every rank holds, of sets of several lengths, evaluated twice."""
    got: list[Any] = []
    for length in lengths * 2:
        got.append(elche.evaluate(worth, over(length)))
        got.append(elche.evaluate(lambda b: worth(b)["mse"], over(length)))
        got.append(elche.evaluate(worth, over(length), weight_of=weigh))
        tree = elche.predict(rows, over(length))
        got.append([tree["sum"].tolist(), tree["parts"][0].tolist(), tree["parts"][1]])
        main = elche.predict(rows, over(length, batch_size=7), on="main")
        got.append(None if main is None else main["sum"].tolist())
    return got


LENGTHS = (1, 9, 23)


def in_a_run(policy: str) -> tuple[list[Any], list[Any]]:
    """Before, inside (under sync) and after an epoch."""
    model, optimizer, loader = elche.setup(*build(Task(samples=40)), policy=policy)
    before, state = found(LENGTHS), torch.get_rng_state()
    elche.evaluate(worth, over(9))
    assert torch.equal(state, torch.get_rng_state())
    for number, (x, y, *_) in enumerate(loader):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and policy == "sync":
            assert same(found((9,)), found((9,)))
        elif number == 0 and policy == "cadence":
            with pytest.raises(ConfigError, match=r"elche\.evaluate inside the loop"):
                elche.evaluate(worth, over(9))
    after = found(LENGTHS)
    elche.shutdown()
    return before, after


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_ranks_find_what_one_device_finds(ranks2: RankPool, policy: str) -> None:
    torch.set_num_threads(1)
    alone = found(LENGTHS)
    ranks = ranks2.serve(in_a_run, policy)
    for rank, runs in enumerate(ranks):
        for run in runs:
            for place, (mine, his) in enumerate(zip(run, alone, strict=True)):
                is_for_main = place % 5 == 4
                assert same(mine, None if is_for_main and rank else his)


def in_training_mode() -> None:
    made = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model = elche.convert_sync_batchnorm(made.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=8)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for call in (elche.evaluate, elche.predict):
        with pytest.raises(ConfigError, match=rf"'1' is in .* elche\.{call.__name__},"):
            call(lambda batch: model(batch[0]), over(23))
    model.eval()
    losses = [elche.evaluate(lambda b: model(b[0]).mean(), over(23))]
    model.train()
    for x, y in loader:  # where they meet again
        (model(x) - y).square().mean().backward()
        optimizer.step()
    model.eval()
    losses.append(elche.evaluate(lambda b: model(b[0]).mean(), over(23)))
    assert losses[0] != losses[1]
    elche.shutdown()


def test_batch_norm_over_ranks_needs_evaluation_mode(ranks2: RankPool) -> None:
    ranks2.serve(in_training_mode)


@given(
    st.lists(st.just(0.0) | st.floats(1e-3, 1e6), min_size=1, max_size=6).filter(any),
    st.integers(1, 1000),
)
def test_every_batch_is_one_ranks_by_its_speed(
    speeds: list[float], batches: int
) -> None:
    parts = [batches_of(rank, speeds, batches) for rank in range(len(speeds))]
    assert [0, *(stop for _, stop in parts)] == [*(at for at, _ in parts), batches]
    for (start, stop), speed in zip(parts, speeds, strict=True):
        assert abs(stop - start - batches * speed / sum(speeds)) <= 1 + 1e-6


def test_means_are_by_samples_or_by_weight() -> None:
    mse = (X - X.square()).square().mean()
    assert elche.evaluate(lambda b: worth(b)["mse"], over(23)) == pytest.approx(mse)
    parts = [X[at : at + 4] for at in range(0, 23, 4)]
    by_weight = sum(float(p.mean() * p.square().sum()) for p in parts)
    got = elche.evaluate(lambda b: b[0].mean(), over(23), weight_of=weigh)
    assert got == pytest.approx(by_weight / float(X.square().sum()))
    nothing = elche.evaluate(lambda b: 1.0, over(23), weight_of=lambda b: 0.0)
    assert math.isnan(nothing)
    assert math.isnan(elche.evaluate(lambda b: b[0].mean().log(), over(23)))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: elche.evaluate(worth, DATA), "expected a DataLoader .* TensorDataset"),
        (
            lambda: elche.evaluate(worth, DataLoader(Stream())),
            "expected a map-style data set, got an IterableDataset",
        ),
        (
            lambda: elche.evaluate(
                worth, DataLoader(DATA, sampler=RandomSampler(DATA, generator=None))
            ),
            "in their order, got one with a sampler",
        ),
        (lambda: elche.evaluate(worth, over(9, drop_last=True)), "one with drop_last"),
        (lambda: elche.evaluate(worth, over(0)), "the evaluation set is empty"),
        (
            lambda: elche.evaluate(lambda b: b[0], over(9)),
            r"the mean over the batch as a number.* Tensor of shape \[4, 1\]",
        ),
        (
            lambda: elche.predict(rows, over(9), on="rank0"),
            "unknown on 'rank0'; expected one of: all, main",
        ),
        (
            lambda: elche.predict(lambda b: b[0][1:], over(9)),
            r"a row for each of 4 samples, got a tensor of shape \[3, 1\]",
        ),
        (
            lambda: elche.predict(lambda b: b[0].expand(-1, len(b[0])), over(9)),
            "rows of one shape from every batch",
        ),
        (lambda: elche.predict(lambda b: 3, over(9)), "expected a tensor of rows"),
    ],
)
def test_what_cannot_be_divided_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def a_trainer(**options: Any) -> elche.Trainer:
    def model() -> nn.Module:
        torch.manual_seed(4)
        return nn.Linear(1, 1, dtype=torch.float64)

    return elche.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        nn.MSELoss(),
        dataset=DATA,
        eval_dataset=DATA,
        batch_size=8,
        epochs=2,
        shuffle=False,
        **options,
    )


def trained() -> list[Any]:
    trainer = a_trainer()
    fresh = trainer.evaluate(DATA)
    result = trainer.fit()
    last = result.history[-1].eval_loss
    assert trainer.evaluate(DATA) == last != fresh
    zeros = {name: torch.zeros_like(v) for name, v in result.model_state.items()}
    at_zero = trainer.evaluate(DATA, state=zeros)
    assert at_zero == pytest.approx(float(X.pow(4).mean()))
    out = trainer.predict(DATA)
    weight, bias = (v.double() for v in result.model_state.values())
    assert torch.allclose(out, X * weight + bias)
    doubled = trainer.predict(DATA, step=lambda model, b: 2 * model(b[0]), on="main")
    assert doubled is None or torch.equal(doubled, 2 * out)
    return [fresh, last, at_zero, out.tolist(), doubled is None]


def test_a_trainer_evaluates_and_predicts_after_fit(ranks2: RankPool) -> None:
    *alone, _ = trained()
    ranks = ranks2.serve(trained)
    assert [rank.pop() for rank in ranks] == [False, True]
    assert ranks[0] == ranks[1]
    for mine, his in zip(ranks[0], alone, strict=True):
        assert torch.tensor(mine).allclose(torch.tensor(his))


def test_not_while_it_trains() -> None:
    held: list[elche.Trainer] = []

    def on_epoch(record: elche.trainer.EpochRecord) -> None:
        with pytest.raises(ConfigError, match=r"call them when fit\(\) has returned"):
            held[0].predict(DATA)

    held.append(a_trainer(on_epoch_end=on_epoch))
    assert len(held[0].fit().history) == 2
