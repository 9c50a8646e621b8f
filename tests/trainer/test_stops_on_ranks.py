"""A Trainer is stopped or aborted on one of several ranks, and all end."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import AbortedError, RemoteRankError
from elche.session.process import failing_together
from tests.distributed.cases.tasks import identical
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

SAMPLES, WAIT_S = 4000, 200.0


def start(
    policy: str, reached: threading.Event, norm: str = ""
) -> elche.trainer.TrainingHandle:
    """Far more epochs than there is time for; says when there were some batches."""

    def model() -> nn.Module:
        if not norm:
            return nn.Linear(2, 1)
        layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return elche.convert_sync_batchnorm(layers)

    batches = itertools.count()

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(batches) == 30:
            reached.set()
        return (out - target).square().mean()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 2, generator=generator)
    return elche.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        loss,
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=40,
        epochs=100_000,
        policy=policy,
        lr_schedule=lambda progress: 1.0 - progress / 2,
    ).start()


def stop_on(stopping: set[int], policy: str, norm: str = "") -> Any:
    torch.manual_seed(2)
    reached = threading.Event()
    handle = start(policy, reached, norm)
    if elche.rank() in stopping:
        assert reached.wait(WAIT_S)
        result = handle.stop(WAIT_S)
    else:  # perhaps it never comes so far
        result = handle.join(WAIT_S)
    samples = [record.samples for record in result.history]
    losses = [record.train_loss for record in result.history]
    return result.model_state, result.stopped_by, samples, losses


@pytest.mark.parametrize(
    ("policy", "stopping", "norm"),
    [
        ("sync", {0, 1}, ""),
        ("cadence", {1}, ""),
        ("async", {0}, ""),
        ("sync", {1}, "sync"),
    ],
)
def test_a_stop_on_one_rank_is_one_on_all(
    ranks2: RankPool, policy: str, stopping: set[int], norm: str
) -> None:
    both = ranks2.run(
        stop_on, stopping, policy, norm, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical([found[0] for found in both])
    assert both[0][1:] == both[1][1:]
    _, stopped_by, samples, losses = both[0]
    assert stopped_by == "stop"
    assert samples[:-1] == [SAMPLES] * (len(samples) - 1)
    assert samples[-1] <= SAMPLES
    assert len(losses) == len(samples) > 0


def abort_on(aborting: int, policy: str, fault: str) -> str:
    reached = threading.Event()
    handle = start(policy, reached)
    if elche.rank() == aborting:
        assert reached.wait(WAIT_S)
        if fault:
            with pytest.raises(ValueError, match=fault), failing_together():
                raise ValueError(fault)
        else:
            handle.abort()
    pattern = fault or "was aborted"
    with pytest.raises((AbortedError, RemoteRankError), match=pattern) as caught:
        handle.join(WAIT_S)
    assert handle.poll() is elche.trainer.TrainingPhase.FAILED
    elche.shutdown()  # else the run is there for the next case of these ranks
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("policy", "aborting"), [("sync", 1), ("cadence", 0)])
def test_an_abort_on_one_rank_ends_all(
    ranks2: RankPool, policy: str, aborting: int
) -> None:
    said = ranks2.run(abort_on, aborting, policy, "", case_setup=serve_in_thread)
    assert said[aborting] == "AbortedError: the training was aborted"
    assert said[1 - aborting].startswith(
        f"RemoteRankError: rank {aborting} failed: elche.errors.AbortedError"
    )


def test_a_failure_in_the_main_thread_ends_the_one_that_trains(
    ranks2: RankPool,
) -> None:
    fault = "beside the training"
    said = ranks2.run(abort_on, 1, "sync", fault, case_setup=serve_in_thread)
    for each in said:
        first_line = each.partition("\n")[0]
        assert first_line == f"RemoteRankError: rank 1 failed: ValueError: {fault}"
