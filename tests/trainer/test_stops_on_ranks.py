"""A Trainer is aborted, or fails, on one of several ranks, and all end.

`test_last_checkpoint.py` has stops.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.errors import AbortedError, RemoteRankError
from elche.session.process import failing_together
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SAMPLES, WAIT_S = 4000, 200.0


def start(policy: str, reached: threading.Event) -> elche.trainer.TrainingHandle:
    """Far more epochs than there is time for; says when there were some batches."""
    batches = itertools.count()

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(batches) == 30:
            reached.set()
        return (out - target).square().mean()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 2, generator=generator)
    return elche.Trainer(
        lambda: nn.Linear(2, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        loss,
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=40,
        epochs=100_000,
        policy=policy,
    ).start()


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
    said = ranks2.serve(abort_on, aborting, policy, "")
    assert said[aborting] == "AbortedError: the training was aborted"
    assert said[1 - aborting].startswith(
        f"RemoteRankError: rank {aborting} failed: elche.errors.AbortedError"
    )


def test_a_failure_in_the_main_thread_ends_the_one_that_trains(
    ranks2: RankPool,
) -> None:
    fault = "beside the training"
    said = ranks2.serve(abort_on, 1, "sync", fault)
    for each in said:
        first_line = each.partition("\n")[0]
        assert first_line == f"RemoteRankError: rank 1 failed: ValueError: {fault}"
