"""Under `auto` the fastest device trains alone for a while; then all train in step."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.cadence.chooser import Choice
from elche.cadence.goodput import MeasuredCluster, predict
from elche.coordination.auto import auto_chooser, first_choice
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    build,
    difference,
    identical,
    plain,
    shared,
)
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

TASK = Task(
    samples=480,
    batch_size=8,
    epochs=16,  # alone, a window may last as long as an epoch
    dtype="float64",
    # A limit: on a busy machine a reduction may take as long as many of these batches.
    options={"policy": "auto", "max_anchor": 20},
)


class Scripted:
    """In place of a chooser: all ranks in step, then rank 1 alone, then all again."""

    def __init__(self, **_: Any) -> None:
        self.observed = 0

    def fix_update(self, update: str) -> None:
        assert update == "gradients"

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        """The next choice: alone at the second and third observation."""
        self.observed += 1
        ranks = [1] if 2 <= self.observed <= 3 else [0, 1]
        return Choice(
            policy="sync",
            anchor=1,
            left_out=tuple({0, 1}.difference(ranks)),
            prediction=predict("sync", cluster, ranks),
            alternatives=(),
            reason=f"as the test wants: {ranks}",
        )


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Choices are scripted; who had trained alone whenever all went on in step."""
    monkeypatch.setattr(auto_chooser, "Chooser", Scripted)
    monkeypatch.setattr(auto_chooser, "OBSERVED_GRANTS", 2)
    monkeypatch.setattr(first_choice, "MOST_STEPS", 1)
    returned: list[int] = []
    monkeypatch.setattr(auto_chooser, "RETURN_COST", 1e9)
    carry_out = AutoChooser._carry_out

    def note(auto: AutoChooser, *, alike: bool) -> None:
        carry_out(auto, alike=alike)
        if auto.state_from is not None:
            returned.append(auto.state_from)

    monkeypatch.setattr(AutoChooser, "_carry_out", note)
    return returned


@pytest.mark.parametrize(
    "optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"]
)
def test_what_one_rank_did_alone_is_what_all_go_on_from(
    ranks2: RankPool, returned: list[int], optimizer: str
) -> None:
    """One process on the same batches, optimizer state and all, whoever took steps."""
    task = dataclasses.replace(TASK, optimizer=optimizer)
    reference = plain(task)
    traces = ranks2.run(shared, task, case_setup=serve_in_thread)
    assert set(returned) == {1}
    assert len(traces[0].orders[-1]) > 0
    for epoch in range(task.epochs):
        seen = sorted(index for trace in traces for index in trace.orders[epoch])
        assert seen == list(range(task.samples))
    assert identical([trace.state for trace in traces])
    assert all(bool(torch.isfinite(v).all()) for v in traces[0].state.values())
    assert difference(traces[0].state, reference.state) <= 1e-11


def with_two_optimizers(task: Task) -> Trace:
    """The head has an optimizer of its own, which elche is not told of."""
    model, optimizer, loader = build(task)
    body, head = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = torch.optim.SGD(body, lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(head, lr=1e-2)
    if this_place_is_a_rank():
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, **nested(task.options)
        )
    trace = Trace()
    for _ in range(task.epochs):
        trace.orders.append([])
        for x, y, index, _ in loader:
            run = current_run()
            if run is None or run.samples_in_hand:
                trace.orders[-1] += index.tolist()
            F.cross_entropy(model(x), y).backward()
            for each in (optimizer, second):
                each.step()
                each.zero_grad()
    trace.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    elche.shutdown()
    return trace


def this_place_is_a_rank() -> bool:
    return "RANK" in os.environ


def test_a_second_optimizers_state_is_handed_on_too(
    ranks2: RankPool, returned: list[int]
) -> None:
    traces = ranks2.run(with_two_optimizers, TASK, case_setup=serve_in_thread)
    assert set(returned) == {1}
    assert identical([trace.state for trace in traces])
    reference = with_two_optimizers(TASK)
    assert difference(traces[0].state, reference.state) <= 1e-11
