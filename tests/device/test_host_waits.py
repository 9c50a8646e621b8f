"""Waits of the host: readings are complete, and clocks count the device's work."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche.comm.gradients.buckets.bucket_pass import BucketPass
from elche.comm.transport.process_group import Group
from elche.demo.contender import Contender, ContenderSpec
from elche.demo.workload import Workload
from elche.devices.streams import record_event
from elche.pipeline.setup.building import layers_of
from elche.pipeline.setup.profiling import profile_layers
from elche.runtime.process.worker import HOST_AHEAD_BATCHES, Worker
from elche.runtime.report.scalars import BUFFER_VALUES, Readback, ScalarLog
from tests.device import held, kernel_count, set_speed


@pytest.mark.usefixtures("delayed")
def test_readback_is_complete(device: torch.device) -> None:
    for number in range(1, 5):
        values = torch.full((100,), float(number), device=device) * 2
        reading = Readback(values)
        del values
        assert reading.values() == [2.0 * number] * 100


def test_readback_is_polled(device: torch.device) -> None:
    values = torch.ones(3, device=device)
    with held():
        reading = Readback(values)
        assert not reading.is_done()
    reading.values()
    assert reading.is_done()


@pytest.mark.usefixtures("delayed")
def test_scalars_of_two_streams_are_whole(device: torch.device) -> None:
    log, side = ScalarLog(), torch.Stream(device)
    count = BUFFER_VALUES + 5  # one buffer is full, the other is not
    for stream in (torch.accelerator.current_stream(), side):
        with stream:
            value = torch.zeros((), device=device)
            for _ in range(count):
                log.log("loss", value.add_(1.0), 1.0)  # changed after it is logged
    total = 2 * sum(range(1, count + 1))
    assert log.drain(final=True) == (("loss", float(total), 2.0 * count),)


def test_host_is_two_batches_ahead(device: torch.device) -> None:
    """It waits for the third batch before the one that it has launched, not longer."""
    worker: Any = SimpleNamespace(
        placement=SimpleNamespace(device=device), _events=deque()
    )
    values, batches = torch.zeros(10, device=device), []
    with held():
        for _ in range(HOST_AHEAD_BATCHES):
            values.add_(1)
            batches.append(torch.accelerator.current_stream().record_event())
            Worker.pace_device(worker)
        assert not batches[0].query()
    set_speed(0, kernel_us=20_000)
    for _ in range(3):
        for _ in range(2):
            values.add_(1)
        batches.append(torch.accelerator.current_stream().record_event())
        Worker.pace_device(worker)
        assert batches[-1 - HOST_AHEAD_BATCHES].query()


def test_a_devices_gradients_are_no_wait_for_other_ranks(device: torch.device) -> None:
    set_speed(0, kernel_us=20_000)
    torch.zeros(10, device=device).add_(1)
    computed = [record_event(device)]
    reduction: Any = SimpleNamespace(_group=Group.alone(60.0), _computed=computed)
    assert BucketPass._await_own(reduction) >= 0.02
    assert computed[0].query()


def test_times_of_layers_include_the_device(device: torch.device) -> None:
    set_speed(0, kernel_us=2000)
    layers = layers_of([nn.Linear(4, 4)], None)
    (layer,) = profile_layers(layers, torch.ones(2, 4), device)
    assert layer.forward_s >= 2e-3
    assert layer.backward_s >= 4e-3


class Small(Contender):
    """Trains a linear layer; counts the kernels."""

    kernels = 0

    def _segment(self, model: nn.Module, loader: Any) -> None:
        before = kernel_count()
        super()._segment(model, loader)
        torch.accelerator.synchronize()
        self.kernels += kernel_count() - before

    def _build_workload(self) -> Workload:
        data = (torch.randn(16, 4), torch.randint(3, (16,)))
        return Workload(
            name="small",
            seed=0,
            learning_rate=0.1,
            train_dataset=TensorDataset(*data),
            eval_batches=(data,),
            source="",
            network_fn=lambda: nn.Linear(4, 3),
        )


def test_training_time_of_contenders_includes_the_device(device: torch.device) -> None:
    set_speed(0, kernel_us=5000)
    contender = Small(ContenderSpec(kind="solo", samples=16, batch_size=8))
    assert contender.run()["train_s"] >= 0.005 * contender.kernels
