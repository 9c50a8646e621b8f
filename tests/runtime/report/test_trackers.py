"""Metrics in experiment trackers: what is logged, at which step, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ConfigError
from elche.session.process import process
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

Logged = list[tuple[dict[str, float], int]]


class LogWriter:
    """Of the `log(values, step=)` family."""

    def __init__(self) -> None:
        self.logged: Logged = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logged.append((values, step))


class ScalarWriter:
    """As a SummaryWriter."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []
        self.flushes = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))

    def flush(self) -> None:
        self.flushes += 1


class BrokenWriter:
    """Fails at its first values."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls += 1
        raise OSError("the disk is full")


@pytest.fixture(autouse=True)
def no_trackers(plain_environment: None) -> Iterator[None]:
    yield
    elche.log_to(None)


def train(epochs: int = 2, loss: float = 2.0, **options: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=4)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
    for epoch in range(epochs):
        for (x,) in loader:
            model(x).mean().backward()
            elche.log_scalar("loss", loss + epoch)
            optimizer.step()


def test_a_run_on_one_device_is_logged_at_its_steps() -> None:
    by_log, by_scalar = LogWriter(), ScalarWriter()
    elche.log_to(by_log)
    elche.log_to(by_scalar)
    train()
    assert by_log.logged == [
        ({"loss": 2.0} | by_log.logged[0][0], 10),
        ({"epoch/loss": 2.0}, 10),
        ({"loss": 3.0} | by_log.logged[2][0], 20),
        ({"epoch/loss": 3.0}, 20),
    ]
    names = {"loss", "elche/samples_per_s", "elche/efficiency", "elche/share/0"}
    assert by_log.logged[0][0].keys() == names
    assert by_log.logged[0][0]["loss"] == 2.0
    assert by_scalar.logged == [
        (name, value, step)
        for values, step in by_log.logged
        for name, value in values.items()
    ]
    assert by_scalar.flushes == 2


def test_a_writer_that_fails_is_left_out_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, writer = BrokenWriter(), LogWriter()
    elche.log_to(broken)
    elche.log_to(writer)
    with caplog.at_level(logging.ERROR):
        train()
    assert broken.calls == 1
    assert len(writer.logged) == 4
    assert "nothing more is logged to it" in caplog.text
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("writer", [print, "tensorboard", logging.getLogger("elche")])
def test_what_is_no_writer_is_refused_at_once(writer: object) -> None:
    with pytest.raises(ConfigError, match=r"add_scalar.*as a SummaryWriter, or with"):
        elche.log_to(writer)
    assert not process.trackers


def _logged_by_ranks() -> list[Logged]:
    """What each of two runs logs on this rank: by policy."""
    found = []
    for policy in ("sync", "cadence"):
        writer = LogWriter()
        elche.log_to(writer)
        train(policy=policy)
        elche.shutdown()
        elche.log_to(None)
        found.append(writer.logged)
    assert this_place().world_size == 2
    return found


@pytest.mark.distributed
def test_rank_0_alone_logs_for_all_ranks(ranks2: RankPool) -> None:
    first, other = ranks2.run(_logged_by_ranks, case_setup=serve_in_thread)
    assert other == [[], []]
    for logged in first:
        steps = [step for _, step in logged]
        assert steps == sorted(steps)
        assert [x for x in logged if "epoch/loss" in x[0]] == [
            ({"epoch/loss": 2.0}, 10),
            ({"epoch/loss": 3.0}, 20),
        ]
        windows = [values for values, _ in logged if "elche/share/1" in values]
        assert len(windows) > 1
        for values in windows:
            shares = values["elche/share/0"] + values["elche/share/1"]
            assert shares in (0.0, pytest.approx(1.0))
