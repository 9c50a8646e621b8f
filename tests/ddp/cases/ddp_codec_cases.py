"""What ranks run in the tests of gradients that travel encoded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from elche.comm.gradients import buckets
from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import CommunicationError, MismatchError
from tests.ddp.cases.ddp_cases import FEATURES, build, torch_world
from tests.harness.rank_main import this_place


@dataclass
class Scaled:
    """What a rank held after each step, and its scaler's scale."""

    states: list[torch.Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + this_place().rank)
    x = torch.randn(4, FEATURES, generator=generator)
    return x, torch.randint(3, (4,), generator=generator)


def with_a_scaler(codec: str) -> Scaled:
    """The second of three steps overflows on rank 1."""
    seen = Scaled()
    with torch_world():
        ddp = DistributedDataParallel(build("mlp", "float32"), codec=codec)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(3):
            x, y = batch(step)
            if step == 1 and this_place().rank == 1:
                x[0, 0] = torch.inf
            scaler.scale(F.cross_entropy(ddp(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
            seen.states.append(flat)
            seen.scales.append(scaler.get_scale())
    return seen


def _left_out(ddp: DistributedDataParallel) -> float:
    left = ddp._built.reducer._pass.residuals().values()
    return max(float(each.abs().max()) for each in left)


def in_another_group() -> tuple[float, float]:
    """What was left out before and after :meth:`set_group`."""
    with torch_world():
        ddp = DistributedDataParallel(build("mlp", "float32"), codec="int4")
        x, y = batch(0)
        F.cross_entropy(ddp(x), y).backward()
        before = _left_out(ddp)
        ddp.set_group()
        return before, _left_out(ddp)


def disagreeing() -> str:
    with torch_world():
        codec = ("int8", "int4")[this_place().rank]
        try:
            DistributedDataParallel(build("mlp", "float32"), codec=codec)  # type: ignore[arg-type]
        except MismatchError as error:
            return str(error)
    return ""


def killed() -> str:
    """Rank 1's process ends before the second step, while rank 0 waits for it."""
    buckets.LOOKED_S = 0.1
    with torch_world(timeout_s=300.0):
        model = build("mlp", "float32")
        ddp = DistributedDataParallel(model, codec="int8", transport="gloo")
        for step in range(2):
            x, y = batch(step)
            loss = F.cross_entropy(ddp(x), y)
            if step and this_place().rank == 1:
                os._exit(3)
            try:
                loss.backward()
            except CommunicationError as error:
                return str(error)
    return "reduced"
