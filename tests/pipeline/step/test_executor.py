"""The executor's gradients are those of one process, with ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.planning import PipelinePlan, make_plan
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.stage import Layer, Stage
from elche.pipeline.step.executor import Executor, StepInput, StepResults
from elche.schedule.actions import Kind
from tests.comm.thread_group import on_ranks
from tests.comm.transport.thread_link import Cable, transports

WIDTH = 5
SIZES = (3, 1, 4, 3, 2, 3)
"""Samples of each microbatch."""
TIMEOUT_S = 30.0


class Several(nn.Module):
    """Hands on what gets a gradient, what needs none, what gets none, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.body(x)), x.detach() > 0, x * 2, 0.5


class Joined(nn.Module):
    """Takes them, and a keyword that is given per microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, _: Any, share: float, *, shift: float
    ) -> torch.Tensor:
        return torch.tanh(self.body(torch.where(mask, x, share * x)) + shift)


class Whole(nn.Module):
    """All layers in one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            [
                *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Several(), Joined()),
                *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.ReLU()),
                nn.Linear(7, 2),
            ]
        )
        self.double()

    def forward(self, x: torch.Tensor, shift: float) -> torch.Tensor:
        value: Any = x
        for layer in self.layers:
            given = {"shift": shift} if isinstance(layer, Joined) else {}
            value = (
                layer(*value, **given)
                if type(value) is tuple
                else layer(value, **given)
            )
        assert isinstance(value, torch.Tensor)
        return value


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@dataclass
class Batch:
    """Microbatches, and what the loss of each counts."""

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    keywords: list[dict[str, Any]]
    weights: list[float]

    @staticmethod
    def drawn(seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        return Batch(
            [torch.randn(n, WIDTH, generator=draw).double() for n in SIZES],
            [torch.randn(n, 2, generator=draw).double() for n in SIZES],
            [{"shift": 0.1 * number} for number in range(len(SIZES))],
            [2.0 * n / sum(SIZES) for n in SIZES],
        )

    def given(self, rank: int, plan: PipelinePlan) -> StepInput:
        """What a rank is handed: inputs at the first stage, targets at the last one."""
        placement = plan.schedule.placement
        return StepInput(
            inputs=self.inputs if placement[0] == rank else (),
            targets=self.targets if placement[-1] == rank else (),
            keywords=self.keywords,
            weights=self.weights,
            input_gradients=True,
            timeout_s=TIMEOUT_S,
        )


def executor_for(
    rank: int, plan: PipelinePlan, layers: Sequence[nn.Module], transport: Any
) -> Executor:
    """One rank's part; of the layers it touches its own."""
    stages = {}
    for index in plan.schedule.stages_of(rank):
        own = [Layer(f"layers.{at}", layers[at]) for at in plan.layers_of(index)]
        stage = Stage(index, own, unpacks=True)
        learning = dict(stage.named_parameters())
        guard = ContributionGuard(index, learning, plan.schedule.name)
        stages[index] = StageBackward(stage, guard)
    cpu = torch.device("cpu")
    return Executor(rank, plan.schedule, stages, transport, loss_of, cpu)


def planned(schedule: str, ranks: int) -> PipelinePlan:
    return make_plan(schedule, len(SIZES), ranks, 8, PipelineConfig())


@dataclass
class Ended:
    """What one rank has at the end."""

    steps: list[StepResults]
    evaluated: StepResults
    left: int


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: one.grad.clone()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=what)


SCHEDULES = [
    *(("gpipe", 2), ("1f1b", 3), ("zb-h1", 2), ("zb-h2", 3)),
    *(("interleaved-1f1b", 2), ("interleaved-zb", 2), ("zb-v", 2), ("v-min", 3)),
    *(("auto", 3), ("1f1b", 1)),
]


def cables(by: str) -> list[Cable] | None:
    """Between the ranks' devices, up and down; None where there are none."""
    return [Cable(), Cable()] if by == "devices" else None


def are_used(between: list[Cable] | None, ranks: int) -> None:
    if between is not None:
        up, down = ({low < high for low, high in one.carried} for one in between)
        assert (up, down) == (({True}, {False}) if ranks > 1 else (set(), set()))


@pytest.mark.parametrize("by", ["host", "devices"])
@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES, ids=str)
def test_two_steps_and_an_evaluation_are_those_of_one_process(
    schedule: str, ranks: int, by: str
) -> None:
    """Gradients of the second step are added to those of the first one."""
    plan = planned(schedule, ranks)
    whole = Whole()
    model = copy.deepcopy(whole)
    batches = [Batch.drawn(seed) for seed in range(2)]
    between = cables(by)
    links = transports(ranks, between)

    def run(group: Any, transport: Any) -> Ended:
        executor = executor_for(group.rank, plan, list(model.layers), transport)
        steps = [executor.train(each.given(group.rank, plan)) for each in batches]
        actions = plan.schedule.actions[group.rank]
        assert [one for one, _, _ in executor.trace] == list(actions)
        splits = any(one.kind is Kind.BACKWARD_INPUT for one in actions)
        deferred = sum(
            executor.stages[index].deferred
            for index in plan.schedule.stages_of(group.rank)
        )
        assert (deferred > 0) is splits
        evaluated = executor.evaluate(batches[0].given(group.rank, plan))
        return Ended(steps, evaluated, transport.untaken)

    ends = on_ranks(ranks, run, links)
    for link in links:
        link.close()
    are_used(between, ranks)
    first, last = (ends[plan.schedule.placement[at]] for at in (0, -1))
    for number, batch in enumerate(batches):
        for at, weight in enumerate(batch.weights):
            x = batch.inputs[at].clone().requires_grad_()
            loss = loss_of(whole(x, **batch.keywords[at]), batch.targets[at])
            (loss * weight).backward()
            assert x.grad is not None
            near(last.steps[number].losses[at], loss.detach(), f"loss {at}")
            (found,) = first.steps[number].input_gradients[at]
            assert found is not None
            near(found, x.grad, f"gradient of input {at}")
    expected = gradients(whole)
    found_all = gradients(model)
    assert found_all.keys() == expected.keys()
    for name, value in expected.items():
        near(found_all[name], value, name)
    with torch.no_grad():
        for at, x in enumerate(batches[0].inputs):
            output = whole(x, **batches[0].keywords[at])
            near(last.evaluated.outputs[at], output, f"output {at}")
            near(
                last.evaluated.losses[at],
                loss_of(output, batches[0].targets[at]),
                f"evaluated loss {at}",
            )
    assert [end.left for end in ends] == [0] * ranks
