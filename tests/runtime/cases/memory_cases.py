"""What ranks run whose devices hold few samples, and the same work in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import elche
from elche.session.process import current_run, failing_together
from tests.distributed.cases.tasks import Numbered, state_of, take_step
from tests.harness.logged import logged
from tests.harness.settings import nested

OutOfMemory = torch.cuda.OutOfMemoryError
SAMPLES, BATCH = 96, 16


@dataclass
class Seen:
    """What a rank trained on and holds at the end, in part by epoch.

    Attributes:
        orders: positions that counted, in the order of training.
        sizes: samples of every forward pass that succeeded on counted samples.
        sent_before: buckets of gradients sent when a backward pass failed.
        scalars: the mean of the positions, logged by the loss function.
    """

    orders: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    failures: int = 0
    sent_before: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    cap: int = 0
    shares: list[tuple[float, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def network() -> nn.Sequential:
    """The same at every call."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    return model.double()


class FailsInBackward(torch.autograd.Function):
    """Runs out of memory on rank 0, once, in a backward through more than ``most``."""

    seen: Seen | None = None
    most = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Nothing."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Fails once."""
        cls, run = FailsInBackward, current_run()
        if cls.seen is not None and not cls.seen.failures and len(gradient) > cls.most:
            assert run is not None
            reducer: Any = run._synchroniser.reducer
            cls.seen.failures += 1
            cls.seen.sent_before.append(reducer._queue.sent)
            raise OutOfMemory("in backward")
        return gradient


def fitted(options: Mapping[str, Any], backward_most: int = 0) -> Seen:
    """A Trainer's run on this rank."""
    seen, place = Seen(), os.environ.get("RANK")
    order: list[int] = []
    FailsInBackward.seen = seen if backward_most and place == "0" else None
    FailsInBackward.most = backward_most

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        x, y, index, _ = batch
        try:
            out = model[0](x) if backward_most else model(x)
        except OutOfMemory:
            seen.failures += 1
            raise
        if backward_most:
            out = model[1:](FailsInBackward.apply(out))
        run = current_run()
        if run is None or run.current_samples:
            order.extend(index.tolist())
            seen.sizes.append(len(x))
        elche.log_scalar("position", index.double().mean())
        sums = options.get("loss_reduction", "mean")
        by_label = torch.arange(3).double() if "weight_of" in options else None
        return F.cross_entropy(out, y, by_label, reduction=sums)

    def end_epoch(_: Any) -> None:
        run = current_run()
        seen.cap = max(seen.cap, 0 if run is None else run.worker.max_samples)

    trainer = elche.Trainer(
        network,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        loss_of,
        dataset=Numbered(SAMPLES, dtype="float64"),
        batch_size=BATCH,
        epochs=2,
        on_epoch_end=end_epoch,
        **nested({"policy": "sync", "seed": 5, **options}),
    )
    try:
        with logged("elche") as seen.warnings:
            result = trainer.fit()
    finally:
        FailsInBackward.seen = None
    seen.orders = [order]
    seen.state = result.model_state
    seen.shares = [record.shares for record in result.history]
    seen.losses = [record.train_loss for record in result.history]
    seen.scalars = [record.scalars["position"] for record in result.history]
    return seen


def looped(options: Mapping[str, Any], most: int = 0) -> Seen:
    """A loop of the user's own on this rank; ``most`` samples fit rank 1's device."""
    seen = Seen()
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9
    )
    order = torch.Generator().manual_seed(11)
    loader: Any = torch.utils.data.DataLoader(
        Numbered(SAMPLES, dtype="float64"), BATCH, shuffle=True, generator=order
    )
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    with failing_together():  # as the hook of an uncaught exception does
        for _ in range(2):
            positions: list[int] = []
            batches = iter(loader)  # held: an error does not end it
            for x, y, index, _ in batches:
                run = current_run()
                if run is None or run.current_samples:
                    positions += index.tolist()
                    seen.sizes.append(len(x))
                if most and elche.rank() == 1 and len(x) > most:
                    raise OutOfMemory(f"no room for {len(x)}")
                take_step(model, optimizer, x, y)
            seen.orders.append(positions)
    seen.state = state_of(model)
    elche.shutdown()
    return seen
