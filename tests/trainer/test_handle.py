"""`Trainer.start`, stops and signals on one device."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import AbortedError, ConfigError, DeadlineError
from elche.trainer import TrainingPhase

pytestmark = pytest.mark.usefixtures("plain_environment")

WAIT_S = 60.0
DATA = TensorDataset(torch.arange(40.0).reshape(40, 1), torch.ones(40, 1))


class Gate:
    """A loss that waits in the third batch of the second epoch until it may go on."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.batches = 0
        self.reached, self.may_go = threading.Event(), threading.Event()
        if is_open:
            self.may_go.set()

    def __call__(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        if self.batches == 13:
            self.reached.set()
            assert self.may_go.wait(WAIT_S)
        return (out - target).square().mean()


def trainer(loss: Any, **options: Any) -> elche.Trainer:
    given = {"dataset": DATA, "batch_size": 4, "epochs": 3, "seed": 5} | options
    return elche.Trainer(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        loss,
        **given,
    )


def waiting(**options: Any) -> tuple[Gate, elche.trainer.TrainingHandle]:
    gate = Gate()
    handle = trainer(gate, **options).start()
    assert gate.reached.wait(WAIT_S)
    return gate, handle


def test_the_thread_brings_what_fit_brings() -> None:
    fitted = trainer(Gate(is_open=True)).fit()
    handle = trainer(Gate(is_open=True)).start()
    result = handle.join()
    assert (handle.poll(), handle.error) == (TrainingPhase.FINISHED, None)
    assert result.stopped_by is fitted.stopped_by is None
    assert [r.train_loss for r in result.history] == [
        r.train_loss for r in fitted.history
    ]
    for name, value in fitted.model_state.items():
        assert torch.equal(value, result.model_state[name])
    assert sum(window.samples for window in handle.metrics()) == 120
    assert handle.metrics() == []
    assert handle.stop() is handle.join() is result


def test_a_stop_is_after_the_batch_in_hand() -> None:
    gate, handle = waiting()
    assert handle.poll() is TrainingPhase.TRAINING
    with pytest.raises(DeadlineError, match="had not ended after 0 s"):
        handle.stop(timeout_s=0)
    assert handle.poll() is TrainingPhase.STOPPING
    gate.may_go.set()
    result = handle.join(WAIT_S)
    assert (gate.batches, result.stopped_by) == (13, "stop")
    assert [record.samples for record in result.history] == [40, 12]
    assert result.report.samples == 52


def test_an_abort_leaves_nothing() -> None:
    gate, handle = waiting()
    handle.abort()
    gate.may_go.set()
    with pytest.raises(AbortedError, match="was aborted"):
        handle.join(WAIT_S)
    assert (handle.poll(), gate.batches) == (TrainingPhase.FAILED, 13)
    handle.abort()
    trainer(Gate(is_open=True), epochs=1).fit()


def test_one_trains_at_a_time() -> None:
    gate, handle = waiting()
    for call in (
        trainer(gate).start,
        trainer(gate).fit,
        elche.shutdown,
        lambda: trainer(gate).evaluate(DATA),
    ):
        with pytest.raises(
            ConfigError, match="trains in a thread of this process, one run"
        ):
            call()
    gate.may_go.set()
    assert len(handle.join(WAIT_S).history) == 3


def test_what_the_loss_raises_comes_out_of_join() -> None:
    def broken(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("a fault in the loss")

    handle = trainer(broken).start()
    with pytest.raises(KeyError, match="a fault in the loss") as caught:
        handle.join(WAIT_S)
    assert (handle.poll(), handle.error) == (TrainingPhase.FAILED, caught.value)


def test_a_callback_cannot_wait_for_its_own_end() -> None:
    held: list[elche.trainer.TrainingHandle] = []
    is_held = threading.Event()

    def on_epoch(record: elche.trainer.EpochRecord) -> None:
        assert is_held.wait(WAIT_S)
        held[0].stop()

    held.append(trainer(Gate(is_open=True), on_epoch_end=on_epoch).start())
    is_held.set()
    with pytest.raises(ConfigError, match="cannot wait for its own end"):
        held[0].join(WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_fit_with_a_result(number: signal.Signals) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].max() == 39.0:
            signal.raise_signal(number)
        out: torch.Tensor = model(batch[0]).mean()
        return out

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    result = trainer(loss, shuffle=False, eval_dataset=DATA).fit()
    assert result.stopped_by == number.name
    assert [
        signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)
    ] == before


def test_signals_in_the_main_thread_reach_the_thread_that_trains(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate, handle = waiting()
    os.kill(os.getpid(), signal.SIGINT)
    assert handle.poll() is TrainingPhase.STOPPING
    gate.may_go.set()
    assert handle.join(WAIT_S).stopped_by == "SIGINT"
    assert "elche: SIGINT: training stops; a second" in capfd.readouterr().err
    gate, handle = waiting()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    gate.may_go.set()
    with pytest.raises(AbortedError, match="was aborted"):
        handle.join(WAIT_S)
    handle = trainer(Gate(is_open=True)).start()
    handle._thread.join(WAIT_S)  # it is over, and nobody has joined it
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_of_the_users_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        gate, handle = waiting()
        os.kill(os.getpid(), signal.SIGTERM)
        assert handle.poll() is TrainingPhase.TRAINING
        os.kill(os.getpid(), signal.SIGINT)
        gate.may_go.set()
        assert handle.join(WAIT_S).stopped_by == "SIGINT"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
