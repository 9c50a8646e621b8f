"""Under `auto` the fastest device trains alone for a while; then all train in step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elche.coordination.auto import auto_chooser, first_choice
from elche.coordination.auto.auto_chooser import AutoChooser
from tests.distributed.cases.tasks import Task, difference, identical, plain, shared
from tests.harness.choices import want
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

TASK = Task(
    samples=480,
    batch_size=8,
    epochs=16,  # alone, a window may last as long as an epoch
    dtype="float64",
    # A limit: on a busy machine a reduction may take as long as many of these batches.
    options={"policy": "auto", "max_anchor": 20},
)


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Choices are scripted; who had trained alone whenever all went on in step."""
    alone, together = ("sync", (1,)), ("sync", ())
    want(monkeypatch, together, alone, alone, together)
    monkeypatch.setattr(auto_chooser, "OBSERVED_GRANTS", 2)
    monkeypatch.setattr(first_choice, "MOST_STEPS", 1)
    returned: list[int] = []
    monkeypatch.setattr(auto_chooser, "RETURN_COST", 1e9)
    carry_out = AutoChooser._carry_out

    def note(auto: AutoChooser, now_s: float, *, alike: bool) -> None:
        carry_out(auto, now_s, alike=alike)
        if auto.state_from is not None:
            returned.append(auto.state_from)

    monkeypatch.setattr(AutoChooser, "_carry_out", note)
    return returned


def test_what_one_rank_did_alone_is_what_all_go_on_from(
    ranks2: RankPool, returned: list[int]
) -> None:
    """One process on the same batches, optimizer state and all, whoever took steps."""
    task = dataclasses.replace(TASK, optimizer="adamw")
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
