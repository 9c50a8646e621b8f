"""`policy="delayed_sync"`: the rule, that it overlaps, and what it ends with."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elche
from elche.config import RunConfig
from elche.errors import ConfigError, NonFiniteError, RemoteRankError
from elche.session.process import current_run
from tests.distributed.cases.tasks import difference, identical
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

SAMPLES, BATCH, EPOCHS, CLIP = 70, 16, 3, 0.05
WAIT_S = 60.0
LATE = "delayed_sync"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8)] if norm else [nn.Linear(4, 8)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 1)).double()


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def schedule(progress: float) -> float:
    return 1.0 - 0.7 * progress


def trainer(name: str, **options: Any) -> elche.Trainer:
    given: dict[str, Any] = {
        "dataset": data(),
        "eval_dataset": data(),
        "eval_batch_size": SAMPLES,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": False,
        "max_grad_norm": CLIP,
        "lr_schedule": schedule,
        "policy": LATE,
        "speed_hints": None,
    }
    norm = options.pop("norm", False)
    loss = options.pop("loss", nn.MSELoss())
    return elche.Trainer(
        lambda: network(norm),
        lambda parameters: optimizer(name, parameters),
        loss,
        **given | options,
    )


def train(name: str, **options: Any) -> elche.trainer.TrainResult:
    return trainer(name, **options).fit()


class Branching:
    """Uses the last layer's bias in every other batch only."""

    def __init__(self) -> None:
        self._batches = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._batches += 1
        *first, last = model.children()
        hidden = nn.Sequential(*first)(batch[0])
        bias = last.bias if self._batches % 2 else None
        return nn.functional.mse_loss(
            nn.functional.linear(hidden, last.weight, bias), batch[1]
        )


def plainly(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def length(batch: Any) -> int:
    return len(batch[0])


def by_the_rule(name: str, loss_of: Any = plainly) -> nn.Module:
    """The same in one process, gradient by gradient."""
    model = network()
    parameters = list(model.parameters())
    steps = optimizer(name, parameters)
    rate, done = steps.param_groups[0]["lr"], 0
    x, y = data().tensors
    waiting: tuple[torch.Tensor | None, ...] | None = None

    def update(gradients: tuple[torch.Tensor | None, ...]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        steps.step()

    for epoch in range(EPOCHS):
        own = [parameter.detach().clone() for parameter in parameters]
        for start in range(0, SAMPLES, BATCH):
            steps.param_groups[0]["lr"] = rate * schedule(done / (SAMPLES * EPOCHS))
            part = slice(start, start + BATCH)
            loss = loss_of(model, (x[part], y[part]))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, kept in zip(parameters, own, strict=True):
                    parameter.copy_(kept)
            if waiting is not None:
                update(waiting)
            waiting = gradients
            with torch.no_grad():
                for parameter, kept in zip(parameters, own, strict=True):
                    move = parameter - kept
                    kept.copy_(parameter)
                    parameter.add_(move)
            done += len(x[part])
            if done == SAMPLES * (epoch + 1):
                with torch.no_grad():
                    for parameter, kept in zip(parameters, own, strict=True):
                        parameter.copy_(kept)
                update(waiting)
                waiting = None
    return model


def states_of(name: str, options: dict[str, Any]) -> Any:
    result = train(name, **options)
    losses = [record.eval_loss for record in result.history]
    return result.model_state, losses, result.stopped_by


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"transport": {"kind": "gloo", "bucket_cap_mb": 0.0001}}),
        ("adamw", {}),
        ("adamw", {"max_samples": (5, None)}),
        ("sgd", {"weight_of": length}),
    ],
)
def test_it_is_the_rule_in_one_process(
    ranks2: RankPool, name: str, options: dict[str, Any]
) -> None:
    expected = by_the_rule(name)
    both = ranks2.run(
        states_of, name, options, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical([found[0] for found in both])
    state, losses, stopped_by = both[0]
    assert difference(state, expected.state_dict()) <= 1e-12
    x, y = data().tensors
    loss = nn.functional.mse_loss(expected(x), y).item()
    assert losses[-1] == pytest.approx(loss)
    assert both[1][1:] == both[0][1:]
    assert stopped_by is None


@pytest.mark.distributed
def test_a_parameter_without_a_gradient_is_left_alone(ranks2: RankPool) -> None:
    expected = by_the_rule("sgd", Branching())
    options = {"loss": Branching(), "eval_dataset": None}
    both = ranks2.run(
        states_of, "sgd", options, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical([found[0] for found in both])
    assert difference(both[0][0], expected.state_dict()) <= 1e-12


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{"codec": "int8"}, {"norm": True}, {"loss_reduction": "sum"}]
)
def test_ranks_end_with_equal_replicas(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    if "loss_reduction" in options:
        options = {**options, "loss": nn.MSELoss(reduction="sum"), "epochs": 1}
    both = ranks2.run(
        states_of, "sgd", options, case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    assert identical([found[0] for found in both])
    assert all(bool(value.isfinite().all()) for value in both[0][0].values())


LONG = 30


class Meeting:
    """Rank 1 is in a batch until rank 0 is in the next one."""

    def __init__(self, folder: Path) -> None:
        self._word = folder / "begun"
        self._batches = 0
        self.has_met = False

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._batches += 1
        if elche.rank() == 0 and self._batches == 4:
            self._word.touch()
        if elche.rank() == 1 and self._batches == 3:
            until_s = time.monotonic() + WAIT_S
            while not self._word.exists() and time.monotonic() < until_s:
                time.sleep(1e-3)
            self.has_met = self._word.exists()
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def meet(folder: str) -> bool:
    meeting = Meeting(Path(folder))
    train("sgd", loss=meeting, epochs=1, eval_dataset=None)
    return meeting.has_met


@pytest.mark.distributed
def test_a_rank_goes_on_while_the_others_finish_the_step(
    ranks2: RankPool, tmp_path: Path
) -> None:
    """Under ``sync`` rank 0 would wait in its third step."""
    found = ranks2.run(meet, str(tmp_path), case_setup=serve_in_thread)
    assert found == [False, True]


def fail_by_nan(bad_rank: int) -> str:
    batches = itertools.count()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        is_bad = next(batches) == 7 and elche.rank() == bad_rank
        found = nn.functional.mse_loss(output, target)
        return found * float("nan") if is_bad else found

    with pytest.raises(NonFiniteError, match="have become NaN") as caught:
        train("sgd", loss=loss, epochs=LONG)
    return str(caught.value)


@pytest.mark.distributed
def test_who_brought_nan_is_named(ranks2: RankPool) -> None:
    for said in ranks2.run(fail_by_nan, 1, case_setup=serve_in_thread):
        assert "was rank 1's own, in step" in said


def die_on_rank_1() -> str:
    seen = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == 4 and elche.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(output, target)

    with pytest.raises(RemoteRankError, match="rank 1") as caught:
        train("sgd", loss=loss)
    return str(caught.value)


@pytest.mark.distributed
def test_a_death_with_a_sum_under_way_ends_all_at_once(ranks2: RankPool) -> None:
    began_s = time.monotonic()
    alive, dead = ranks2.run(
        die_on_rank_1, case_setup=serve_in_thread, expect_failure=True
    )
    assert "rank 1" in alive.value
    assert dead.error is not None
    assert time.monotonic() - began_s < WAIT_S  # not the run's timeout_s


@pytest.mark.usefixtures("plain_environment")
def test_one_device_trains_as_without_it() -> None:
    late, plain = train("adamw"), train("adamw", policy="sync")
    assert identical([late.model_state, plain.model_state])
    assert late.report.policy == LATE


@pytest.mark.usefixtures("plain_environment")
def test_it_needs_a_trainer() -> None:
    model = network()
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    with pytest.raises(ConfigError, match=r"use elche\.Trainer, or choose policy="):
        elche.setup(model, optimizer("sgd", model.parameters()), loader, policy=LATE)
    assert current_run() is None


def test_it_has_no_windows() -> None:
    with pytest.raises(ConfigError, match="reduces gradients at every batch"):
        RunConfig(policy=LATE, windows={"anchor": 2})  # type: ignore[arg-type]
