"""Scalars and metrics on one device, and how they are waited for."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import elche
from elche.config import RunConfig
from elche.coordination.accounts.metrics import EpochMetrics, WindowMetrics
from elche.errors import CommunicationError, ConfigError, DeadlineError
from elche.runtime.report import scalars
from elche.runtime.report.metrics_view import MetricsView
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.single import SingleRun
from elche.runtime.training import Training
from tests.harness.settings import nested
from tests.runtime.report.test_notifications import epoch_of

pytestmark = pytest.mark.usefixtures("plain_environment")


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(length)).reshape(length, 1))


def set_up(loader: DataLoader[Any], **options: Any) -> Any:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return elche.setup(model, optimizer, loader, **nested(options))


def single_run(loader: DataLoader[Any]) -> SingleRun:
    """A run in which each batch is a window of its own."""
    model = nn.Linear(1, 1)
    training = Training(
        config=RunConfig(),
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        loader=loader,
    )
    return SingleRun(training, torch.device("cpu"), window_s=0.0)


def source_of(*epochs: int) -> Any:
    """A run of which nothing is known but the metrics of these epochs."""
    source = SimpleNamespace(notifications=RunNotifications(0))
    for number in epochs:
        source.notifications.add(replace(epoch_of((1,), (0.0,)), epoch=number))
    return source


@pytest.mark.parametrize("seed", [None, 5])
def test_a_mean_is_over_samples(seed: int | None) -> None:
    """The short last batch counts as much as it has samples."""
    model, _, loader = set_up(DataLoader(numbers(10), batch_size=4), seed=seed)
    for (x,) in loader:
        elche.log_scalar("x", x.mean())
        elche.log_scalar("one", 1)
    metrics = elche.epoch_metrics()
    assert metrics.scalars == {"one": 1.0, "x": 4.5}
    assert (metrics.epoch, metrics.rank_samples, metrics.shares) == (0, (10,), (1.0,))
    assert metrics.synchronisations == 0
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert metrics.parameter_norm == pytest.approx(float(flat.norm()))


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(7.0))


class Opaque:
    """A batch in which nobody can count."""

    def __init__(self, items: list[Any]) -> None:
        self.mean = sum(float(item[0]) for item in items) / len(items)


@pytest.mark.parametrize(
    ("loader", "mean"),
    [
        (DataLoader(numbers(7), batch_sampler=[[0], [1, 2, 3], [4, 5, 6]]), 3.0),
        (DataLoader(Streamed(), batch_size=3), 3.0),
        (DataLoader(numbers(7), batch_size=3, drop_last=True), 2.5),
        (DataLoader(numbers(7), batch_size=3, collate_fn=Opaque), 3.0),
        (DataLoader(numbers(7), batch_size=None), 3.0),
    ],
    ids=["batch sampler", "iterable", "drop last", "opaque", "no batching"],
)
def test_samples_in_hand_of_every_loader(loader: DataLoader[Any], mean: float) -> None:
    _, _, loader = set_up(loader)
    for batch in loader:
        if isinstance(batch, Opaque):
            elche.log_scalar("x", batch.mean)
        else:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            elche.log_scalar("x", x.float().mean())
    assert elche.epoch_metrics().scalars == {"x": pytest.approx(mean)}


def test_what_is_logged_weighs_what_the_user_says() -> None:
    """Asked once for each batch, as on several ranks."""
    asked: list[int] = []

    def weight_of(batch: Any) -> torch.Tensor:
        asked.append(len(batch[0]))
        total: torch.Tensor = batch[0].sum()
        return total

    loader = DataLoader(numbers(5), batch_size=2)
    _, _, loader = set_up(loader, weight_of=weight_of)
    for number, (x,) in enumerate(loader):
        if number != 1:
            elche.log_scalar("x", float(number))
            elche.log_scalar("mean", x.mean())
    metrics = elche.epoch_metrics()
    assert metrics.scalars == {
        "x": pytest.approx(2 * 4 / 5),
        "mean": pytest.approx((1 * 0.5 + 4 * 4) / 5),
    }
    assert metrics.samples == 5
    assert asked == [2, 2, 1]


def test_nothing_counts_outside_the_loop() -> None:
    _, _, loader = set_up(DataLoader(numbers(4), batch_size=2))
    elche.log_scalar("loss", 100.0)
    for _ in loader:
        elche.log_scalar("loss", 1.0)
    elche.log_scalar("loss", 100.0)
    assert elche.epoch_metrics().scalars == {"loss": 1.0}
    for _ in loader:
        pass
    assert elche.epoch_metrics().scalars == {}
    assert elche.epoch_metrics().parameter_norm is None


def test_windows_are_read_once_and_tile_the_epochs() -> None:
    run = single_run(DataLoader(numbers(10), batch_size=2))
    view = MetricsView(run)
    read: list[WindowMetrics] = []
    for epoch_number in range(2):
        for (x,) in run.epoch():
            view.log("x", x.mean())
            read += view.windows()
        read += view.windows()
        metrics = view.epoch(epoch_number, None)
        mine = [each for each in read if each.epoch == epoch_number]
        assert sum(each.samples for each in mine) == metrics.samples == 10
        assert sum(each.busy_s[0] for each in mine) == pytest.approx(metrics.busy_s[0])
        assert math.fsum(each.duration_s for each in mine) == pytest.approx(
            metrics.duration_s
        )
        assert metrics.scalars == {"x": 4.5}
    assert [each.window for each in read] == list(range(len(read)))
    assert [each.samples for each in read] == 2 * [2, 2, 2, 2, 2, 0]
    assert view.windows() == []


def test_waiting_for_data_is_measured() -> None:
    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.02)
            return torch.ones(1)

    _, _, loader = set_up(DataLoader(Slow(), batch_size=2))
    for _ in loader:
        time.sleep(0.01)
    metrics = elche.epoch_metrics()
    assert 0.08 <= metrics.data_wait_s[0] < metrics.busy_s[0]
    assert metrics.compute_s[0] >= 0.02
    assert metrics.duration_s >= metrics.busy_s[0]
    assert metrics.rank_samples_per_s[0] == pytest.approx(4 / metrics.busy_s[0])


def test_the_end_of_an_epoch_waits_for_what_was_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(scalars.Readback):
        """A copy that is never there unless somebody waits for it."""

        def is_done(self) -> bool:
            return False

    monkeypatch.setattr(scalars, "Readback", Late)
    run = single_run(DataLoader(numbers(4), batch_size=2))
    view = MetricsView(run)
    for (x,) in run.epoch():
        view.log("x", x.mean())
    assert view.epoch(None, None).scalars == {"x": 1.5}
    assert [each.scalars for each in view.windows()] == [{}, {}, {"x": 1.5}]


def test_a_broken_epoch_has_metrics() -> None:
    _, _, loader = set_up(DataLoader(numbers(10), batch_size=2))
    for number, _ in enumerate(loader):
        elche.log_scalar("number", number)
        if number == 2:
            break
    gc.collect()
    metrics = elche.epoch_metrics()
    # Once 4: on several ranks the batch that the loop breaks off in counts.
    assert metrics.samples == 6
    assert metrics.scalars == {"number": 1.0}
    assert (elche.progress_samples(), elche.progress_steps()) == (6, 3.0)


def test_the_training_thread_cannot_wait_for_itself() -> None:
    _, _, loader = set_up(DataLoader(numbers(4)))
    with pytest.raises(ConfigError, match="metrics of an epoch are not there yet"):
        elche.epoch_metrics()
    for _ in loader:
        with pytest.raises(ConfigError, match="the metrics of epoch 0 are not there"):
            elche.epoch_metrics(epoch=0)
    assert elche.epoch_metrics(epoch=0) == elche.epoch_metrics()


def test_another_thread_waits_for_an_epoch() -> None:
    _, _, loader = set_up(DataLoader(numbers(4)))
    seen: list[EpochMetrics] = []
    watcher = threading.Thread(
        target=lambda: seen.extend(
            elche.epoch_metrics(epoch=number, timeout_s=60.0) for number in range(2)
        )
    )
    watcher.start()
    for _ in range(2):
        for _ in loader:
            pass
    watcher.join(60.0)
    assert [each.epoch for each in seen] == [0, 1]


@pytest.mark.parametrize(
    ("number", "timeout_s", "kind", "says"),
    [
        (None, None, CommunicationError, "the run ended before an epoch did"),
        (1, None, CommunicationError, "the run ended before epoch 1 did"),
        (1, 0.03, DeadlineError, "epoch 1 did not end within 0.03 s"),
    ],
)
def test_a_wait_ends_with_the_run_or_at_its_deadline(
    number: int | None, timeout_s: float | None, kind: type[Exception], says: str
) -> None:
    view = MetricsView(source_of(*[0] * (number is not None)))
    failures: list[str] = []

    def watch() -> None:
        with pytest.raises(kind) as raised:
            view.epoch(number, timeout_s)
        failures.append(str(raised.value))

    watcher = threading.Thread(target=watch)
    watcher.start()
    if timeout_s is None:
        view.end()
    watcher.join(60.0)
    assert failures == [says]


def test_a_forgotten_epoch() -> None:
    with pytest.raises(ConfigError, match=r"epoch 1 are forgotten; kept .* 2 to 4"):
        MetricsView(source_of(2, 3, 4)).epoch(1, None)


def test_metrics_outlive_the_run_but_the_model_does_not() -> None:
    model, _, loader = set_up(DataLoader(numbers(4)))
    for _ in loader:
        elche.log_scalar("loss", 2.0)
    alive = weakref.ref(model)
    elche.shutdown()
    del model, loader
    gc.collect()
    assert alive() is None
    assert elche.epoch_metrics().scalars == {"loss": 2.0}


def test_what_a_scaler_skips_is_told_on_one_device_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "elche")
    model, optimizer, loader = set_up(DataLoader(numbers(12), batch_size=3))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, (x,) in enumerate(loader):
        loss = model(x).sum() * (float("inf") if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert elche.epoch_metrics().scalars == {"grad_scaler_skips": 0.25}
    assert "epoch 0: GradScaler skipped 25 % of the optimizer's steps" in caplog.text
