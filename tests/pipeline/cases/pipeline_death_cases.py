"""Replicas of a pipeline of which some die, and the same work in one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.comm.transport.messages import Message
from elche.errors import ConfigError
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.step import executor
from elche.pipeline.step.stepping import Stepping
from tests.harness.rank_main import this_place

WIDTH, STEPS, MICRO_BATCHES = 6, 6, 2
TABLE = torch.linspace(0.5, 2, 14, dtype=torch.float64)
"""Every microbatch needs all of it; the batch of step 3 has as many samples."""
END, CLIP = "the end of the step", "clip_grad_norm_"
COMPUTING, SOME = "computing", ", after some ranks have the result"
OUTPUTS = "outputs"


@dataclass(frozen=True)
class Deaths:
    """Who dies, in which step and where.

    `where` is `COMPUTING`, `OUTPUTS`, or an exchange: before it, or with `SOME` in it.
    """

    replicas: int = 2
    schedule: str = "1f1b"
    at: Mapping[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class Survivor:
    """What a rank has at the end."""

    rank: int
    replicas: int
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    evaluated: float
    steps: int = STEPS


class Counted(nn.Module):
    """A layer that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("replaced_passes", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, table: torch.Tensor = TABLE) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.replaced_passes = self.replaced_passes + 1
            self.seen.copy_(x.detach().mean())  # another one on each replica
        return torch.tanh(self.linear(x)) * table.mean()


def model() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Counted().double() for _ in range(4)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of sizes that no number of replicas divides."""
    made = torch.Generator().manual_seed(5)

    def drawn(size: int) -> torch.Tensor:
        return torch.randn(size, WIDTH, generator=made, dtype=torch.float64)

    return [(drawn(11 + step), drawn(11 + step)) for step in range(STEPS)]


def alone() -> Survivor:
    """The run of one process."""
    whole = nn.Sequential(*model())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    found = Survivor(0, 1, [], [], {}, 0.0)
    for step, (x, y) in enumerate(batches()):
        if step % 2 == 0:
            optimizer.zero_grad()
        loss = F.mse_loss(whole(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        found.losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        found.norms.append(float(norm))
        optimizer.step()
    found.state = {n: p.detach() for n, p in whole.named_parameters()}
    found.evaluated = F.mse_loss(whole.eval()(x), y).item()
    return found


class _Reaper:
    """Kills this rank where it is to die."""

    def __init__(self, deaths: Deaths) -> None:
        self.step, self.all = -1, set(deaths.at.values())
        self.at, self.where = deaths.at.get(this_place().rank, (-1, ""))

    def maybe(self, where: str) -> None:
        if (self.step, where) == (self.at, self.where):
            time.sleep(0.3)  # what was sent arrives
            os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, peers: StagePeers, *given: Any) -> list[Any]:
        value, timeout_s, what = given
        self.maybe(what)
        if (self.step, self.where) == (self.at, what + SOME):
            ranks = range(1, peers.world_size)
            values = [value]
            for rank in ranks:
                values.append(peers.receive(rank, timeout_s, what).structure)
            peers.send(ranks[-1], Message(structure=values), timeout_s, what)
            self.maybe(self.where)
        return _exchange(peers, *given)

    def outputs(self, owner: Stepping, *given: Any) -> Any:
        """The victim does not send them; nor do others before they hear of it."""
        self.maybe(OUTPUTS)
        peers, last = owner.communicator.peers, owner.parts.plan.schedule.placement[-1]
        if (self.step, OUTPUTS) in self.all and peers and peers.rank == last:
            self.all.discard((self.step, OUTPUTS))
            peers.awaits_loss()
        return _outputs(owner, *given)


_exchange, _outputs = StagePeers.exchange, Stepping._outputs


def dying(deaths: Deaths) -> Survivor:
    """A run in which some ranks die."""
    reaper, do = _Reaper(deaths), executor._Run.do

    def done(run: Any, action: Any) -> None:
        do(run, action)
        if action.microbatch == 1:
            reaper.maybe(COMPUTING)

    with (
        pytest.MonkeyPatch.context() as patch,
        Pipeline(
            model(),
            F.mse_loss,
            micro_batches=MICRO_BATCHES,
            schedule=deaths.schedule,
            replicas=deaths.replicas,
            split_batches=True,
            timeout_s=100.0,
        ) as pipe,
    ):
        patch.setattr(executor._Run, "do", done)
        patch.setattr(StagePeers, "exchange", lambda *a: reaper.exchange(*a))
        patch.setattr(Stepping, "_outputs", lambda *a: reaper.outputs(*a))
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        found = Survivor(0, 0, [], [], {}, 0.0)
        for step, (x, y) in enumerate(batches()):
            reaper.step = step
            if step % 2 == 0:
                pipe.zero_grad()
            found.losses.append(pipe.step(x, y, outputs="all", table=TABLE).loss)
            found.norms.append(pipe.clip_grad_norm_(0.05))
            optimizer.step()
        found.state = pipe.state_dict()
        evaluated = pipe.evaluate(x, y, table=TABLE).loss
        assert evaluated is not None
        found.evaluated = evaluated
        found.rank, found.replicas = pipe.rank, pipe.num_replicas
        found.steps = pipe.steps_done
    if len(pipe.schedule.actions) < this_place().world_size:
        with pytest.raises(ConfigError, match="ranks died in an earlier Pipeline"):
            Pipeline(model(), F.mse_loss, micro_batches=1, timeout_s=1.0)
    return found
