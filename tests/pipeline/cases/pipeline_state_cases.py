"""Pipelines that are saved and resumed elsewhere, and the same loop in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.pipeline.pipeline import Pipeline
from elche.session.process import current_run, failing_together
from tests.pipeline.cases.pipeline_cases import CALM, WIDTH, loss_of

EPOCHS, BATCHES, BATCH = 3, 4, 12


@dataclass(frozen=True)
class StateWork:
    """How a pipeline is cut.

    Attributes:
        partition: layers of each stage.
        schedule: by name.
        replicas: that train together.
        dropout: whether there is any, which follows the count of steps.
    """

    partition: tuple[int, ...]
    schedule: str = "1f1b"
    replicas: int = 1
    dropout: bool = False


def make_layers(dropout: bool = False) -> list[nn.Module]:
    """Eight layers, of which the second and the sixth share their weight."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(7)]
    layers[5].weight = layers[1].weight
    if dropout:
        layers[2] = nn.Sequential(layers[2], nn.Dropout(0.3))
    layers.append(nn.Linear(WIDTH, 3))
    return [nn.Sequential(layer, nn.Tanh()).double() for layer in layers]


def make_loader(generator: torch.Generator | None = None) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * BATCH, WIDTH, generator=drawn).double()
    y = torch.randint(3, (len(x),), generator=drawn)
    data = TensorDataset(x, y)
    return DataLoader(data, BATCH, shuffle=True, generator=generator)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    listed = list(parameters)
    # Where a gradient is zero but for rounding, a small eps makes steps of rounding.
    return torch.optim.AdamW(
        [
            {"params": [one for one in listed if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in listed if one.dim() <= 1], "lr": 0.02},
        ],
        lr=0.01,
        eps=1e-3,
        amsgrad=True,
    )


def trained_alone(seed: int = 3) -> list[float]:
    """Losses of the whole run in plain torch, with clipping, scheduler and scaler."""
    whole = nn.Sequential(*make_layers())
    optimizer = make_optimizer(whole.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    torch.manual_seed(seed)
    loader, losses = make_loader(), []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(whole(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.append(loss.item())
    return losses


@contextmanager
def made(given: StateWork) -> Iterator[Pipeline]:
    with Pipeline(
        make_layers(given.dropout),
        loss_of,
        micro_batches=4 // given.replicas,
        schedule=given.schedule,
        partition=given.partition,
        replicas=given.replicas,
        seed=11,
        **CALM,
    ) as pipe:
        yield pipe


def leave_a_run_that_fails(of_trainer: bool) -> None:
    """As an error does that a notebook's cell ends with."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.zeros(8, 2)), 4)
    elche.setup(model, optimizer, loader)
    run = current_run()
    assert run is not None
    if of_trainer:
        with suppress(ValueError), failing_together():
            raise ValueError
    run.worker.close(None)


def load_other_ties(given: StateWork) -> list[torch.Tensor]:
    """The shared weight on each rank, after a state with two values of it."""
    state = nn.Sequential(*make_layers()).state_dict()
    state["5.0.weight"] = state["5.0.weight"] + 1
    with made(given) as pipe:
        pipe.load_state_dict(state)
        found = pipe.local_state_dict()
        return [v for n, v in found.items() if n in ("1.0.weight", "5.0.weight")]


def train(
    given: StateWork,
    folder: str,
    save_after: int = 0,
    leave_after: int = 0,
    resumes: bool = False,
    registers: bool = True,
) -> tuple[int, list[float]]:
    """Trains; asks for a checkpoint after a step, and leaves after another.

    Returns:
        Number of the first step here, and the losses from it on.
    """
    losses: list[float] = []
    with made(given) as pipe:
        optimizer = make_optimizer(pipe.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        if registers:
            pipe.register_optimizer(optimizer)
            elche.register_for_checkpointing(scheduler=scheduler, scaler=scaler)
        else:
            elche.register_for_checkpointing(optimizer, scheduler, scaler=scaler)
        torch.manual_seed(99 if resumes else 3)
        assert elche.resume(folder) == resumes
        loader, first, at = make_loader(), pipe.steps_done, pipe.steps_done
        share = slice(pipe.replica, None, pipe.num_replicas)
        for _ in elche.epochs(EPOCHS):
            for x, y in pipe.batches(loader):
                pipe.zero_grad()
                out = pipe.step(x[share], y[share], loss_scale=scaler.get_scale())
                assert pipe.unscale_(scaler, optimizer)
                pipe.clip_grad_norm_(0.05)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                losses.append(out.loss)
                at += 1
                if at == save_after and at % BATCHES:
                    elche.save(folder)
                if at == leave_after:
                    return first, losses
            if at == save_after and at % BATCHES == 0:
                elche.save(folder)
    return first, losses


def continued(given: StateWork, steps: int, state: Any = None) -> tuple[Any, float]:
    """Trains some steps, from a state if one is given.

    Returns:
        State of model and optimizer, and the loss after one step more.
    """
    with made(given) as pipe:
        optimizer = make_optimizer(pipe.parameters())
        if state is not None:
            pipe.load_state_dict(state[0])
            pipe.load_optimizer_state_dict(optimizer, state[1])
        x, y = next(iter(make_loader(torch.Generator().manual_seed(2))))
        for _ in range(steps):
            pipe.zero_grad()
            pipe.step(x, y)
            optimizer.step()
        found = pipe.state_dict(), pipe.optimizer_state_dict(optimizer)
        pipe.zero_grad()
        pipe.step(x, y)
        optimizer.step()
        return found, pipe.step(x, y).loss


def overflowing(given: StateWork) -> tuple[list[float], list[float]]:
    """A gradient of the first layer alone overflows: every rank skips that step.

    Returns:
        This rank's scales, and losses.
    """
    scales, losses = [], []
    layers = [layer.float() for layer in make_layers()]
    with torch.no_grad():
        layers[0][0].weight[:, 0] = 0.0
    with Pipeline(
        layers, loss_of, micro_batches=4, partition=given.partition, **CALM
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        for step in range(4):
            x, y = next(iter(make_loader(torch.Generator().manual_seed(2))))
            x = x.float()
            x[:, 0] = 1e30 if step == 1 else 0.0
            pipe.zero_grad()
            losses.append(pipe.step(x, y, loss_scale=scaler.get_scale()).loss)
            assert pipe.unscale_(scaler, optimizer) == (step != 1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales, losses
