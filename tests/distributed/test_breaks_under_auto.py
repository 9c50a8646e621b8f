"""A loop is left early under `auto`, before and after it has chosen windows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.coordination.auto import first_choice
from elche.coordination.sync import step_grants
from elche.errors import ElcheError
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import current_run, failing_together
from tests.distributed.cases.tasks import Task, build, identical
from tests.harness.choices import want
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

SAMPLES, BATCH = 480, 8


@dataclass
class Found:
    """What a rank saw and holds."""

    error: str = ""
    orders: list[list[int]] = field(default_factory=list)
    metrics: list[elche.monitor.EpochMetrics] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    switched: bool = False
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def leave(when: str, who: tuple[int, ...]) -> Found:
    """Two epochs, the first left early by some ranks; asks for the metrics of both."""
    found = Found()
    try:
        with failing_together():
            _train(found, when, who)
    except ElcheError as error:
        found.error = f"{type(error).__name__}: {error}"
    elche.shutdown()
    return found


def _train(found: Found, when: str, who: tuple[int, ...]) -> None:
    task = Task(samples=SAMPLES, batch_size=BATCH)
    model, optimizer, loader = build(task)
    options = {"policy": "auto", "timeout_s": 60.0}
    model, optimizer, loader = elche.setup(model, optimizer, loader, **nested(options))
    run = current_run()
    assert run is not None
    for epoch in range(2):
        order: list[int] = []
        in_windows = 0
        for x, y, index, _ in loader:
            if run.samples_in_hand:
                order += index.tolist()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            elche.log_scalar("seen", 1.0)
            in_windows += isinstance(run.epochs.under_way, WindowEpoch)
            found.switched |= in_windows > 0
            due = len(order) >= BATCH if when == "before" else in_windows == 2
            if epoch == 0 and elche.rank() in who and due:
                break
        found.orders.append(order)
        found.metrics.append(elche.epoch_metrics())
        found.progress.append(elche.progress_samples())
    found.state = {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.fixture(params=["async", "cadence"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Windows are chosen when the first steps are measured."""
    want(monkeypatch, (request.param, ()))
    monkeypatch.setattr(first_choice, "MOST_STEPS", 1)
    monkeypatch.setattr(step_grants, "MAX_GRANT_STEPS", 1)
    return str(request.param)


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_windows_drain_and_are_told(
    ranks2: RankPool, chosen: str, who: tuple[int, ...]
) -> None:
    ranks = ranks2.run(leave, "after", who, case_setup=serve_in_thread)
    assert [rank.error for rank in ranks] == ["", ""]
    check(ranks)


@pytest.mark.parametrize("chosen", ["async"], indirect=True)
def test_steps_are_left_by_all_and_told(ranks2: RankPool, chosen: str) -> None:
    ranks = ranks2.run(leave, "before", (0, 1), case_setup=serve_in_thread)
    assert [rank.error for rank in ranks] == ["", ""]
    check(ranks)


@pytest.mark.parametrize("chosen", ["async"], indirect=True)
@pytest.mark.parametrize("who", [0, 1])
def test_steps_that_one_rank_leaves_end_for_all(
    ranks2: RankPool, chosen: str, who: int
) -> None:
    """Before the switch to windows, or while it is on its way."""
    ranks = ranks2.run(leave, "before", (who,), case_setup=serve_in_thread)
    assert [rank.error for rank in ranks] == ["", ""]
    check(ranks)


def check(ranks: list[Found]) -> None:
    """What was told is what was trained, and the next epoch is whole."""
    assert identical([rank.state for rank in ranks])
    first = ranks[0]
    assert [rank.metrics for rank in ranks] == [first.metrics] * len(ranks)
    assert [rank.progress for rank in ranks] == [first.progress] * len(ranks)
    counts = []
    for epoch in range(2):
        seen = [index for rank in ranks for index in rank.orders[epoch]]
        assert len(seen) == len(set(seen)) == first.metrics[epoch].samples
        assert first.metrics[epoch].scalars == {"seen": pytest.approx(1.0)}
        counts.append(len(seen))
    assert counts[0] < counts[1] == SAMPLES
    assert first.progress == [counts[0], counts[0] + counts[1]]
    assert all(rank.switched for rank in ranks)
