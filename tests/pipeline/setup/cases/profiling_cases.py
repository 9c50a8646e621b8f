"""What ranks of unlike speed run in the tests of profiling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.peers import peers
from elche.pipeline.peers.link_probe import measure_links
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.setup import profiling
from elche.pipeline.split_backward import backward
from elche.pipeline.step import executor
from elche.runtime import emulation
from elche.runtime.process.environment import read_placement
from tests.harness.logged import logged
from tests.harness.rank_main import this_place

WIDTH, LAYERS, MICRO_BATCHES = 6, 10, 4
FAST_S, SLOW_S = 0.002, 0.008
SLOW_RANK = 1


class Clock:
    """Stands for the module `time` where times are measured: only delays take any.

    Attributes:
        quota_s: CPU time (s) that a process has in each `PERIOD_S`; it then stops.
    """

    now_s = cpu_s = 0.0
    quota_s = PERIOD_S = 0.1
    sleeps = 0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s

    perf_counter = monotonic

    @classmethod
    def thread_time(cls) -> float:
        return cls.cpu_s

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now_s += seconds
        cls.sleeps += 1

    @classmethod
    def compute(cls, seconds: float) -> None:
        """Takes CPU time, and waits for the next period where the quota is spent."""
        periods = (cls.cpu_s + seconds) // cls.quota_s - cls.cpu_s // cls.quota_s
        cls.cpu_s += seconds
        cls.now_s += seconds + periods * (cls.PERIOD_S - cls.quota_s)


@contextmanager
def virtual_time(quota: float = 1.0) -> Iterator[None]:
    """Layers and actions take as long as their delays say, on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (profiling, executor, backward, emulation):
            patch.setattr(module, "time", Clock)
        patch.setattr(profiling, "_sleeps", lambda: Clock.sleeps)
        patch.setattr(Clock, "quota_s", quota * Clock.PERIOD_S)
        yield


class Delay(torch.autograd.Function):
    """Takes a time forward and the same time backward; changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        Clock.compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Clock.compute(ctx.seconds)
        return gradient, None


class Emulated(nn.Module):
    """A layer of a device that takes `seconds` for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Delay.apply(torch.tanh(self.linear(x)), self.seconds)
        return found


@dataclass(frozen=True)
class Profiled:
    """What a rank did."""

    layers: int
    partition: tuple[int, ...]
    gradients: dict[str, torch.Tensor]
    loss: float


def layers_with(seconds: float) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Emulated(seconds).double() for _ in range(LAYERS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def profiled(
    schedule: str, micro_batches: int = MICRO_BATCHES, emulates: bool = False
) -> Profiled:
    """One step of a pipeline that measures first."""
    seconds = SLOW_S if this_place().rank == SLOW_RANK else FAST_S
    seconds *= not emulates  # then ELCHE_SPEED makes the ranks unequal
    x, y = batch()
    with (
        virtual_time(),
        Pipeline(
            layers_with(seconds),
            F.mse_loss,
            micro_batches=micro_batches,
            schedule=schedule,
            costs="measure",
            sample=x[: len(x) // micro_batches],
            timeout_s=100,
        ) as pipe,
    ):
        found = pipe.step(x, y)
        gradients = {
            name: one.grad
            for name, one in pipe.named_parameters()
            if one.grad is not None
        }
        return Profiled(len(pipe.layers), pipe.partition, gradients, found.loss)


@dataclass
class LeftOut:
    """Layers of a rank, the model after a step, its loss then, and warnings."""

    layers: int
    state: dict[str, torch.Tensor]
    loss: float | None
    warned: list[str]


def left_out() -> LeftOut:
    """A step with everything a loop does, where rank 1 is far too slow."""
    x, y = batch()
    with (
        logged("elche.pipeline") as warned,
        virtual_time(),
        Pipeline(
            layers_with(50 * SLOW_S if this_place().rank else FAST_S),
            F.mse_loss,
            micro_batches=MICRO_BATCHES,
            costs="measure",
            sample=x[:2],
            timeout_s=100,
        ) as pipe,
    ):
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        pipe.step(x, y, loss_scale=scaler.get_scale())
        pipe.unscale_(scaler, optimizer)
        pipe.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        saved = pipe.optimizer_state_dict(optimizer)
        pipe.load_optimizer_state_dict(optimizer, saved)
        assert len(saved["state"]) == 2 * LAYERS
        loss = pipe.evaluate(x, y).loss
        return LeftOut(len(pipe.layers), pipe.state_dict(), loss, warned)


class SplitsDearly(nn.Module):
    """A layer that takes longer where its weight gradient is put off."""

    def __init__(self, seconds: float, more_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds, self.more_s = seconds, more_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_split = "forward" in vars(self.linear)
        seconds = self.seconds + self.more_s * is_split
        found: torch.Tensor = Delay.apply(torch.tanh(self.linear(x)), seconds)
        return found


class Recurrent(nn.Module):
    """No layer of torch whose weight gradients can be put off."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Delay.apply(x + self.cell(x[:, None])[0][:, 0], SLOW_S)
        return found


def mixed_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    made = [Emulated(SLOW_S), Recurrent(), SplitsDearly(SLOW_S, 0.2 * SLOW_S)] * 2
    return [layer.double() for layer in [*made, SplitsDearly(SLOW_S, 0.01 * SLOW_S)]]


def unsplit() -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """One step of layers of which some run their backward whole.

    Returns:
        Gradients, and by layer whether its weight gradients were put off.
    """
    x, y = batch()
    seen: dict[str, bool] = {}
    with (
        virtual_time(),
        Pipeline(
            mixed_layers(),
            F.mse_loss,
            micro_batches=MICRO_BATCHES,
            schedule="zb-h1",
            costs="measure",
            sample=x[: len(x) // MICRO_BATCHES],
            timeout_s=100,
        ) as pipe,
    ):
        for layer in pipe.layers:

            def look(module: nn.Module, _: Any, name: str = layer.name) -> None:
                linear = getattr(module, "linear", None)
                if linear is not None:
                    seen[name] = "forward" in vars(linear)

            layer.module.register_forward_pre_hook(look)
        pipe.step(x, y)
        found = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        return found, seen


DELAY_S, BYTES_PER_S = 0.02, 4e6


def linked() -> Any:
    """Links of ranks that share no memory; messages leave late and slowly."""
    send = StagePeers.send

    def slowly(self: Any, rank: int, message: Any, *more: Any) -> None:
        time.sleep(DELAY_S + sum(one.nbytes for one in message.tensors) / BYTES_PER_S)
        send(self, rank, message, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "open_message_memory", lambda *_: {})
        patch.setattr(StagePeers, "send", slowly)
        joined = StagePeers.join(read_placement(), 100.0)
        try:
            return measure_links(joined, (0, 1, 2), 100.0)
        finally:
            joined.close()
