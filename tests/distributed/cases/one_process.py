"""What ranks did in a run, done again in one process, by the algorithm's definition.

A record of the run says which batches each rank trained on in each window, and when
it adopted the result of the one before. Here each rank is a model and an optimizer of
its own, and a reduction is written out tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elche.coordination.protocol.instructions import Reduce
from tests.distributed.cases.tasks import (
    Task,
    build,
    label_sum,
    loss_of,
    scaler_of_a_loop,
    step_of,
)
from tests.harness.window_record import Window

Batch = tuple[torch.Tensor, torch.Tensor]


class Replica:
    """One rank: a model, its optimizer, and what its loop keeps."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model, self.optimizer, _ = build(task)
        self.scaler = scaler_of_a_loop()
        self.number = 0
        self.held: list[torch.Tensor] = []
        self.held_buffers: dict[str, torch.Tensor] = {}
        self.is_last = False
        self.trained = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def train(self, batch: Batch) -> None:
        """A batch of the loop."""
        x, y = batch
        loss = loss_of(self.task.loop, self.model, x, y)
        is_bad = self.is_last and self.number == 1
        step_of(
            self.task.loop,
            self.number,
            loss,
            self.model,
            self.optimizer,
            self.scaler,
            is_bad=is_bad,
        )
        self.number += 1
        self.trained += self.weight_of(batch)

    def weight_of(self, batch: Batch) -> float:
        """What a batch weighs in means over ranks."""
        return float(label_sum(batch)) if self.task.weighs else float(len(batch[0]))

    def close(self) -> None:
        """The window ends here: what it is reduced with."""
        self.held = [p.detach().clone() for p in self.parameters]
        self.held_buffers = {n: b.clone() for n, b in self.model.named_buffers()}


@dataclass
class Result:
    """What a reduction makes of the parameters and buffers that it synchronises."""

    parameters: dict[int, torch.Tensor] = field(default_factory=dict)
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)

    def adopt(self, replica: Replica) -> None:
        """Into what a rank holds now; steps since its window's end are kept."""
        with torch.no_grad():
            for index, value in self.parameters.items():
                parameter = replica.parameters[index]
                parameter.add_(value - replica.held[index])
            for name, mean in self.means.items():
                replica.model.get_buffer(name).copy_(mean)
            for name, count in self.counts.items():
                buffer = replica.model.get_buffer(name)
                buffer.copy_(count + buffer - replica.held_buffers[name])


class Windows:
    """All ranks of a run under averaged parameters, or summed gradients."""

    def __init__(self, task: Task, world_size: int) -> None:
        self.task = task
        self.ranks = [Replica(task) for _ in range(world_size)]
        self.ranks[-1].is_last = True
        first = self.ranks[0].parameters
        self.momentum = [torch.zeros_like(p) for p in first]
        self.base: list[torch.Tensor] = []
        self.counts: dict[str, torch.Tensor] = {}

    def epoch(self, plans: Sequence[Window], batches: Sequence[Batch]) -> None:
        """The windows of an epoch; a last result is adopted by all."""
        self.base = [p.detach().clone() for p in self.ranks[0].parameters]
        self.counts = {
            n: b.clone()
            for n, b in self.ranks[0].model.named_buffers()
            if not b.is_floating_point()
        }
        for replica in self.ranks:
            replica.number = 0
        late: Result | None = None
        for plan in plans:
            for rank, replica in enumerate(self.ranks):
                replica.trained = 0.0
                mine = [b for a, z in plan.parts[rank] for b in range(a, z)]
                for at, batch in enumerate(mine):
                    if late is not None and at == plan.adopt_at[rank]:
                        late.adopt(replica)
                    self._train(replica, batches[batch])
                if late is not None and plan.adopt_at[rank] >= len(mine):
                    late.adopt(replica)
            assert plan.reduce is not None
            late = self._reduced(plan.reduce)
        if late is not None:
            for replica in self.ranks:
                late.adopt(replica)

    def _train(self, replica: Replica, batch: Batch) -> None:
        replica.train(batch)

    def _reduced(self, plan: Reduce) -> Result | None:
        """The ranks' windows have ended; None if all adopt the result at once."""
        for replica in self.ranks:
            replica.close()
        result = Result()
        self._average_buffers(result, plan.buffers)
        self._step(result, plan)
        if self.task.options["policy"] == "async":
            return result
        for replica in self.ranks:
            result.adopt(replica)
        return None

    def _step(self, result: Result, plan: Reduce) -> None:
        """The outer step: each rank that trained weighs as much as if all had."""
        rate, momentum = plan.outer_lr, plan.outer_momentum
        trained = [replica for replica in self.ranks if replica.trained > 0]
        for index, base in enumerate(list(self.base)):
            mean = torch.zeros_like(base)
            for replica in trained:
                mean += (base - replica.held[index]) / len(self.ranks)
            step = mean
            if plan.outer != "average":
                held = self.momentum[index] = momentum * self.momentum[index] + mean
                is_slowmo = plan.outer == "slowmo"
                step = held if is_slowmo else mean + momentum * held
                if held.dtype is torch.float32:
                    self.momentum[index] = held.bfloat16().float()
            self.base[index] = result.parameters[index] = base - rate * step

    def _average_buffers(self, result: Result, changed: Sequence[int]) -> None:
        active = [replica for replica in self.ranks if replica.trained]
        names = [name for name, _ in self.ranks[0].model.named_buffers()]
        for name in (names[index] for index in changed):
            held = [replica.held_buffers[name] for replica in active]
            if name in self.counts:
                more = sum(value - self.counts[name] for value in held)
                self.counts[name] = result.counts[name] = self.counts[name] + more
            elif held:
                result.means[name] = torch.stack([v.double() for v in held]).mean(0)


class GradientWindows(Windows):
    """All ranks of a run that sums gradients over a window."""

    def __init__(self, task: Task, world_size: int) -> None:
        super().__init__(task, world_size)
        self.sums: list[torch.Tensor | None] = [None] * len(self.momentum)

    def _train(self, replica: Replica, batch: Batch) -> None:
        x, y = batch
        weight = replica.weight_of(batch)
        loss = loss_of(self.task.loop, replica.model, x, y) * weight
        loss.backward()
        replica.trained += weight
        for index, parameter in enumerate(replica.parameters):
            if parameter.grad is not None:
                before = self.sums[index]
                self.sums[index] = parameter.grad + (0 if before is None else before)
            parameter.grad = None

    def _reduced(self, plan: Reduce) -> Result | None:
        weights = sum(replica.trained for replica in self.ranks)
        result = Result()
        for replica in self.ranks:
            replica.close()
        self._average_buffers(result, plan.buffers)
        most = self.task.options.get("windows_max_grad_norm")
        for replica in self.ranks:
            for parameter, total in zip(replica.parameters, self.sums, strict=True):
                parameter.grad = None if total is None else total / weights
            if most is not None:
                nn.utils.clip_grad_norm_(replica.parameters, most)
            replica.optimizer.step()
            replica.optimizer.zero_grad()
            result.adopt(replica)
        self.sums = [None] * len(self.sums)
        return None


def local_batches(task: Task, loader: Iterable[Any], world_size: int) -> list[Batch]:
    """Batches of an epoch: of each of the loader, a nearly equal part per rank."""
    whole = [(x, y) for x, y, *_ in loader]
    if task.options.get("local_batch_size") == task.batch_size:
        return whole
    least = 2 if task.model == "norm" else 1
    return [
        part
        for x, y in whole
        for parts in [max(1, min(world_size, len(x) // least))]
        for part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
    ]


def replay(
    task: Task, epochs: Sequence[Sequence[Window]], world_size: int
) -> dict[str, torch.Tensor]:
    """The model at the end, of a run whose windows were these."""
    is_summed = task.options.get("update") == "gradients"
    windows = (GradientWindows if is_summed else Windows)(task, world_size)
    _, _, loader = build(task)
    for plans in epochs:
        windows.epoch(plans, local_batches(task, loader, world_size))
    state = windows.ranks[0].model.state_dict()
    for replica in windows.ranks[1:]:
        for name, value in replica.model.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)
    return state
