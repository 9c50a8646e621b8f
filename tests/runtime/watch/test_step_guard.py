"""Optimizer steps along gradients that were not reduced, or of other parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ElcheError
from elche.session.process import failing_together
from tests.distributed.cases.tasks import difference, identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync", "speed_hints": (1.0, 0.4)},
    "cadence": {"policy": "cadence"},
    "async": {"policy": "async"},
    "gradients": {"policy": "cadence", "update": "gradients"},
    "auto": {"policy": "auto"},
}
State = dict[str, torch.Tensor]
ELSEWHERE = torch.ones(2, 6, dtype=torch.float64), torch.tensor([0, 1])
"""No batch of the loader's."""


class Loop:
    """Two small networks, their optimizers, and loops as people write them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 3)]
        self.model = nn.ModuleList(parts).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(44, 6, dtype=torch.float64)
        data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1))
        self.loader: Any = DataLoader(data, 8)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        body, head, _ = self.model
        return F.cross_entropy(head(body(x).tanh()), y)

    def other(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model[2](x), 2 - y)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        pairs = ((p, p.grad) for p in self.model.parameters())
        return ((p, g) for p, g in pairs if g is not None)

    def assign(self, loss: Any, first: int, last: int) -> None:
        """Gradients of these parts without a backward pass."""
        held = [*self.model[first:last].parameters()]
        for parameter, gradient in zip(
            held, torch.autograd.grad(loss, held), strict=True
        ):
            parameter.grad = gradient


def changed(loop: Loop) -> None:
    """Gradients changed by hand, in place and replaced, alike on every rank."""
    for batch in loop.loader:
        loop.backward(*batch)
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.05)
        for parameter, gradient in loop.gradients():
            parameter.grad = gradient * 0.9 + 0.01 * parameter.detach()
        for parameter in loop.model[2].parameters():  # which the loss does not use
            parameter.grad = torch.zeros_like(parameter)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.optimizer.step()  # without a gradient


def accumulated(loop: Loop) -> None:
    """Several passes for a step, the rest stepped after the loop, and steps twice."""
    for number, batch in enumerate(loop.loader):
        loop.loss(*batch).backward()
        if number % 2 == 1:
            loop.optimizer.step()
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=False)
        if number == 4:
            break
    loop.optimizer.step()


def in_turn(loop: Loop) -> None:
    """As a GAN's: both networks get gradients in each pass."""
    one = torch.optim.AdamW(loop.model[:2].parameters(), foreach=True)
    other = torch.optim.Adam(loop.model[2].parameters(), lr=0.01, fused=True)
    for x, y in loop.loader:
        for optimizer, loss in ((one, loop.loss), (other, loop.other)):
            loop.model.zero_grad()
            (loss(x, y) + 0.1 * (loop.loss(x, y) + loop.other(x, y))).backward()
            optimizer.step()


def adversarial(loop: Loop) -> None:
    """Perturbations with an optimizer of their own, made anew for each batch."""
    for x, y in loop.loader:
        delta = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([delta], lr=1.0)
        for _ in range(2):
            inner.zero_grad()
            loss = F.cross_entropy(loop.model[2](x + delta), y) * -len(x)
            loss.backward()
            inner.step()
        loop.backward(x + delta.detach(), y)
        loop.optimizer.step()


def projected(loop: Loop) -> None:
    """PCGrad's: gradients of passes are kept, merged and assigned."""
    for x, y in loop.loader:
        kept: list[list[torch.Tensor]] = []
        for loss in (loop.loss, loop.other):
            loop.optimizer.zero_grad()
            (loss(x, y) + 0.1 * (loop.loss(x, y) + loop.other(x, y))).backward()
            kept.append([g.clone() for _, g in loop.gradients()])
        held = list(loop.model.parameters())
        for parameter, one, other in zip(held, *kept, strict=True):
            parameter.grad = one + other * (one * other).sum().sign()
        loop.optimizer.step()


EXACT = {each.__name__: each for each in (changed, accumulated, in_turn, adversarial)}
EXACT["projected"] = projected


def assigned(loop: Loop, *, in_turn: bool = False) -> None:
    for number, batch in enumerate(loop.loader):
        if in_turn and number % 2 == 0:
            loop.backward(*batch)
        else:
            loop.assign(loop.loss(*batch), 0, 2)
        loop.optimizer.step()
        if not in_turn:
            loop.optimizer.zero_grad()


def assigned_in_a_closure(loop: Loop) -> None:
    for batch in loop.loader:
        loss = loop.loss(*batch)
        loop.optimizer.step(closure=partial(loop.assign, loss, 0, 2))


def one_part_assigned(loop: Loop) -> None:
    """A pass reaches one network, and the other's gradients are made by hand."""
    for batch in loop.loader:
        loop.backward(*batch)
        loop.assign(loop.other(*batch), 2, 3)
        loop.optimizer.step()


def after_the_loop(loop: Loop, *, accumulates: bool = False) -> None:
    """A step on other data, which the last batch may be; into a reduced gradient."""
    for batch in loop.loader:
        loop.loss(*batch).backward()
        if not accumulates:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.loss(*batch).backward()
    loop.optimizer.step()


def before_the_loop(loop: Loop) -> None:
    loop.backward(*ELSEWHERE)
    loop.optimizer.step()


def foreign(loop: Loop) -> None:
    centres = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    other = torch.optim.SGD([centres], lr=0.1)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        other.zero_grad()
        F.cross_entropy(loop.model[2](x) @ centres, y).backward()
        loop.optimizer.step()
        other.step()


def foreign_once(loop: Loop) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.randn(3, dtype=torch.float64))], 0.1)
    for x, y in loop.loader:
        loop.backward(x, y)
        loop.optimizer.step()
        (other.param_groups[0]["params"][0] * x[0, :3]).sum().backward()
        other.step()
        return


UNREDUCED = r"optimizer\.step\(\) outside of the loop, under policy '\w+'"
ASSIGNED = "has a gradient, but no backward pass of this loop"
FOREIGN = r"SGD holds 1 parameters that are not the model's .*ModuleDict"
REFUSED: dict[str, tuple[Callable[[Loop], None], str, str]] = {
    "assigned": (assigned, ASSIGNED, "sync auto"),
    "assigned in turn": (partial(assigned, in_turn=True), ASSIGNED, "sync"),
    "assigned in a closure": (assigned_in_a_closure, ASSIGNED, "sync gradients"),
    "one part assigned": (one_part_assigned, ASSIGNED, "sync"),
    "after": (after_the_loop, UNREDUCED, "sync async gradients"),
    "accumulated after": (partial(after_the_loop, accumulates=True), UNREDUCED, "sync"),
    "before": (before_the_loop, UNREDUCED, "sync cadence"),
    "foreign": (foreign, FOREIGN, "sync async"),
    "foreign, once": (foreign_once, FOREIGN, "sync cadence"),
}


def on_a_rank(policy: str, names: list[str]) -> list[tuple[str, State]]:
    """Loops, each in a run of its own: its error, if any, and the model at the end."""
    found = []
    for name in names:
        loop, error = Loop(), ""
        run = EXACT.get(name) or REFUSED[name][0]
        loop.model, loop.optimizer, loop.loader = elche.setup(
            loop.model, loop.optimizer, loop.loader, **nested(POLICIES[policy])
        )
        try:
            with failing_together():
                run(loop)
        except ElcheError as raised:
            error = str(raised)
        elche.shutdown()
        found.append((error, state_of(loop)))
        loop.optimizer.step()  # the run is over, and the model the script's alone
    return found


def state_of(loop: Loop) -> State:
    return {k: v.detach().clone() for k, v in loop.model.state_dict().items()}


@pytest.mark.parametrize("names", [[*EXACT][:4], [*EXACT][4:]], ids=str)
def test_what_all_ranks_do_alike_is_exact(ranks2: RankPool, names: list[str]) -> None:
    found = ranks2.run(on_a_rank, "sync", names, case_setup=serve_in_thread)
    for name, *ranks in zip(names, *found, strict=True):
        assert [error for error, _ in ranks] == ["", ""], name
        assert identical([state for _, state in ranks]), name
        loop = Loop()
        EXACT[name](loop)
        assert difference(ranks[0][1], state_of(loop)) < 1e-12, name


@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_local_steps_are_taken(ranks2: RankPool, policy: str) -> None:
    """Inside a window they are a rank's own: also along gradients that are assigned."""
    names = ["changed", "adversarial", "in_turn"]
    names += [] if policy == "auto" else ["assigned", "one part assigned"]
    found = ranks2.run(on_a_rank, policy, names, case_setup=serve_in_thread)
    for name, *ranks in zip(names, *found, strict=True):
        assert [error for error, _ in ranks] == ["", ""], name
        assert identical([state for _, state in ranks]), name


CASES = [(name, policy) for name in REFUSED for policy in REFUSED[name][2].split()]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_other_steps_are_refused(ranks2: RankPool, name: str, policy: str) -> None:
    for [(error, _)] in ranks2.run(
        on_a_rank, policy, [name], case_setup=serve_in_thread
    ):
        assert re.search(REFUSED[name][1], error), error
