"""Manual control in a run of one: no process, no socket, the same checks."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elche.by_hand.replica import Replica, init_group
from elche.comm.norm.sync_batch_norm import convert_sync_batchnorm
from elche.comm.transport.process_group import gather_texts
from elche.errors import CommunicationError, ConfigError, MismatchError
from elche.session.process import process, shutdown


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a run of one opened a socket or started a process")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def _filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


@pytest.mark.usefixtures("no_sockets")
def test_a_group_of_one_returns_its_input() -> None:
    group = init_group()
    for value in (torch.arange(3.0), torch.tensor([True]), torch.zeros(0)):
        found = value.clone()
        group.all_reduce(found, "summing")
        group.broadcast(found, "spreading")
        work = group.all_reduce_async(found)
        assert work.is_completed()
        group.wait(work, "summing")
        assert torch.equal(found, value)
    assert group.hosts() == (group.host,)
    assert gather_texts(group, "alone", "telling") == ["alone"]
    group.wait_until(lambda: True, "nobody")
    group.close()
    with pytest.raises(RuntimeError, match="has ended on rank 0") as caught:
        group.all_reduce(torch.ones(1), "summing")  # torch's own is a RuntimeError, too
    assert isinstance(caught.value, CommunicationError)
    assert issubclass(MismatchError, RuntimeError)


@pytest.mark.usefixtures("no_sockets")
def test_alone_everything_returns_at_once_and_changes_nothing() -> None:
    group = init_group()
    assert (group.rank, group.world_size) == (0, 1)
    assert init_group() is group
    model = _filled(3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replica = Replica.wrap(model)
    assert replica.group is group
    assert (replica.rank, replica.world_size) == (0, 1)
    replica.sync_buffers()
    replica.sync_buffers("first")
    replica.all_reduce_gradients()
    replica.weighted_all_reduce_gradients([4])
    replica.weighted_all_reduce_gradients(4)
    replica.weigh_losses(0.5)
    replica.check_equal()
    run = process.manual
    assert run is not None
    run.barrier()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert set(parameter.grad.flatten().tolist()) == {3.0}


def test_alone_sync_batch_norm_is_batch_norm() -> None:
    model = _filled(0.0)
    x = torch.randn(6, 2)
    expected = model(x)
    model[1].reset_running_stats()
    Replica.wrap(convert_sync_batchnorm(model))
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ([], r"expected a batch count per rank \(1\), got 0"),
        ([0], r"expected a count above 0 on at least one rank, got \[0.0\]"),
        ([float("nan")], "expected batch counts of at least 0"),
        (0, r"expected a count above 0 on at least one rank, got \[0.0\]"),
        (-2, "expected batch counts of at least 0, got -2"),
        (float("inf"), "expected batch counts of at least 0, got inf"),
        (None, "expected a batch count per rank, or .* as one number, got None"),
        ("4", "expected a batch count per rank, or .* as one number, got '4'"),
        ([None], r"a batch count per rank, or .* as one number, got \[None\]"),
    ],
)
def test_wrong_counts_are_refused(counts: Any, says: str) -> None:
    replica = Replica.wrap(_filled(1.0))
    with pytest.raises(ConfigError, match=says):
        replica.weighted_all_reduce_gradients(counts)


def test_what_cannot_be_reduced_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"expected model to be a torch\.nn\.Module"):
        Replica.wrap("model")  # type: ignore[arg-type]
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match="words: 0: sparse gradients cannot be"):
        Replica.wrap(sparse, name="words")
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"0\.weight is lazy and has no shape yet"):
        Replica.wrap(lazy)
    rows = nn.Linear(2, 2)
    rows.register_buffer("rows", torch.zeros(3).expand(2, 3))
    with pytest.raises(ConfigError, match="rows has elements that share memory"):
        Replica.wrap(rows)
    model = _filled(1.0)
    model[0].weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(ConfigError, match=r"0\.weight: sparse gradients cannot be"):
        Replica.wrap(model).all_reduce_gradients()


def test_other_arguments_are_checked() -> None:
    replica = Replica.wrap(_filled(1.0))
    with pytest.raises(ConfigError, match="unknown rule 'sum'; expected one of: mean"):
        replica.sync_buffers("sum")
    with pytest.raises(ConfigError, match="expected a loss weight of at least 0"):
        replica.weigh_losses(-1.0)
    shutdown()
    with pytest.raises(ConfigError, match=r"unknown transport\.kind 'pigeons'"):
        init_group(transport="pigeons")
