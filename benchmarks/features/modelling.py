"""Models: compiled, averaged, frozen, normalised, several."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from benchmarks.features.feature import (
    CLASSES,
    EPOCHS,
    INPUTS,
    SAMPLES,
    Seen,
    Trained,
    adamw,
    batches_of,
    epochs_of,
    feature,
    labelled,
    network,
    step,
    trained,
    usual,
)


@feature()
def compile_before(elche: Any) -> Trained:
    """`torch.compile` before set-up."""
    model, loader = network(), batches_of()
    model = torch.compile(model, backend="aot_eager")
    return trained(elche, model, adamw(model), loader)


@feature()
def compile_after(elche: Any) -> Trained:
    """`torch.compile` after set-up."""
    model, optimizer, loader, seen = usual(elche)
    model = torch.compile(model, backend="aot_eager")
    epochs_of(model, optimizer, loader, seen)
    return Trained(model, optimizer, seen)


@feature(why="`copies=[average]`; windows: made at commits, equal on all ranks")
def ema(elche: Any) -> Trained:
    """EMA of the parameters by `AveragedModel`."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    model, optimizer, loader = elche.setup(model, optimizer, loader, copies=[average])
    for _epoch in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
            average.update_parameters(model)
    return Trained(nn.ModuleList([model, average]), optimizer, seen)


@feature()
def swa(elche: Any) -> Trained:
    """SWA: `AveragedModel` and SWALR, per epoch."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = adamw(model)
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=5e-3, anneal_epochs=2)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for x, y in loader:
            step(model, optimizer, x, y, seen)
        if epoch > 0:
            average.update_parameters(model)
            scheduler.step()
    return Trained(nn.ModuleList([model, average]), optimizer, seen)


@feature(why="one is handed over, the other needs nothing")
def two_optimizers(elche: Any) -> Trained:
    """Two optimizers, one for the body and one for the head."""
    model, loader, seen = network(), batches_of(), Seen()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    head_optimizer = adamw(model[2])
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            head_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            head_optimizer.step()
            seen(loss, len(x))
    return Trained(model, optimizer, seen)


@feature()
def frozen(elche: Any) -> Trained:
    """A frozen layer; SGD with momentum in two parameter groups."""
    model, loader = network(), batches_of()
    model[0].requires_grad_(False)
    groups = [
        {"params": [model[2].weight], "weight_decay": 0.01},
        {"params": [model[2].bias], "lr": 0.2},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return trained(elche, model, optimizer, loader)


@feature()
def unused(elche: Any) -> Trained:
    """Parameters that no loss uses."""
    model, loader = network(), batches_of()
    model[1].register_module("auxiliary", nn.Linear(24, 2))
    return trained(elche, model, adamw(model), loader)


@feature()
def unfreezing(elche: Any) -> Trained:
    """A layer unfrozen after an epoch, by `add_param_group`."""
    model, loader, seen = network(), batches_of(), Seen()
    model[0].requires_grad_(False)
    optimizer = adamw(model[2])
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for epoch in range(EPOCHS):
        if epoch == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        for x, y in loader:
            step(model, optimizer, x, y, seen)
    return Trained(model, optimizer, seen)


class Checkpointed(nn.Sequential):
    """Computes its first half again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        hidden = checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False)
        logits: Tensor = self[2](hidden)
        return logits


@feature()
def checkpointing(elche: Any) -> Trained:
    """Activation checkpointing."""
    model, loader = Checkpointed(*network()), batches_of()
    return trained(elche, model, adamw(model), loader)


def _normalised() -> nn.Sequential:
    first, activation, last = network()
    return nn.Sequential(first, nn.BatchNorm1d(24), activation, last)


@feature(
    "D parameters",
    why="statistics of a rank's share, said in a line at set-up; windows:"
    " `num_batches_tracked` counts local batches",
)
def batch_norm(elche: Any) -> Trained:
    """BatchNorm as it is."""
    model, loader = _normalised(), batches_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return trained(elche, model, optimizer, loader)


@feature(windows="N is a SyncBatchNorm layer", why="ranks do not meet at every batch")
def batch_norm_converted(elche: Any) -> Trained:
    """BatchNorm, `elche.convert_sync_batchnorm`."""
    model, loader = _normalised(), batches_of()
    model = elche.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return trained(elche, model, optimizer, loader)


@feature("S", why="masks are drawn by rank")
def dropout(elche: Any) -> Trained:
    """Dropout."""
    loader = batches_of()
    first, activation, last = network()
    model: nn.Module = nn.Sequential(first, activation, nn.Dropout(0.2), last)
    return trained(elche, model, adamw(model), loader)


@feature(why="both in one `ModuleList`; here the noise comes with the data")
def gan(elche: Any) -> Trained:
    """Two models and their optimizers in turn, as in a GAN."""
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(SAMPLES, CLASSES, generator=draw)
    loader, seen = batches_of(TensorDataset(labelled().tensors[0], noise)), Seen()
    generator, critic = nn.Linear(CLASSES, INPUTS), nn.Linear(INPUTS, 1)
    models: Any = nn.ModuleList([generator, critic])
    optimizer, critic_optimizer = adamw(generator), adamw(critic)
    models, optimizer, loader = elche.setup(models, optimizer, loader)
    for _epoch in range(EPOCHS):
        for real, z in loader:
            fake = generator(z)
            loss = F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))
            critic_optimizer.zero_grad()
            loss.mean().backward()
            critic_optimizer.step()
            optimizer.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            optimizer.step()
            seen(loss.mean(), len(real))
    return Trained(models, optimizer, seen)
