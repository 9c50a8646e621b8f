"""An optimizer step after the loop: common under sync, refused under windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.errors import ConfigError
from elche.runtime.process.coordinator import serve_in_thread
from tests.distributed.cases.tasks import Task, build, identical
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed


def accumulate(options: dict[str, Any], after: str) -> dict[str, torch.Tensor]:
    """Two epochs that step at every third batch, and what is done with the rest."""
    model, optimizer, loader = build(Task(samples=112, batch_size=8))
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    for _ in range(2):
        for number, (x, y, _, _) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        _after(after, model, optimizer)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    elche.shutdown()
    return state


def _after(after: str, model: torch.nn.Module, optimizer: Any) -> None:
    if after == "drop":
        optimizer.zero_grad()
    if after == "anew":  # the same on every rank
        optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0, 6).reshape(1, 6)
        F.cross_entropy(model(x), torch.tensor([1])).backward()
    optimizer.step()
    optimizer.zero_grad()


def leave_gradients(policy: str, breaks: bool) -> str:
    """Steps after the loop along what its last batch left; "" if it had none."""
    model, optimizer, loader = build(Task(samples=112, batch_size=8))
    model, optimizer, loader = elche.setup(model, optimizer, loader, policy=policy)
    for x, y, _, _ in loader:
        F.cross_entropy(model(x), y).backward()
        if breaks:
            break
    if all(parameter.grad is None for parameter in model.parameters()):
        elche.shutdown()
        return ""
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"step\(\) after the loop.*'sync'") as caught:
        optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"step\(\) after the loop"):
        other.step()
    assert identical([before, model.state_dict()])
    elche.shutdown()
    optimizer.step()  # the run is over, and the model the script's alone
    return str(caught.value)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_step_after_the_loop_is_refused_under_windows(
    ranks2: RankPool, policy: str, breaks: bool
) -> None:
    said = ranks2.run(leave_gradients, policy, breaks, case_setup=serve_in_thread)
    assert any(said)  # another rank's break may come before this one's first batch
    assert all(f"under policy {policy!r}" in one for one in said if one)


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"policy": "sync"}, "step"),
        ({"policy": "cadence", "update": "gradients"}, "step"),
        ({"policy": "cadence"}, "drop"),
        ({"policy": "cadence", "optimizer_state": "average"}, "anew"),
        ({"policy": "async"}, "drop"),
    ],
)
def test_a_step_that_all_ranks_have_in_common_is_taken(
    ranks2: RankPool, options: dict[str, Any], after: str
) -> None:
    states = ranks2.run(accumulate, options, after, case_setup=serve_in_thread)
    assert identical(states)
