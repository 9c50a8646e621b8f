"""Loops that count steps, of the whole run, over epochs, and end on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elche
from elche.errors import ElcheError
from elche.session.process import current_run, failing_together
from tests.distributed.cases.tasks import (
    Task,
    begin,
    build,
    difference,
    error_of,
    identical,
    state_of,
    take_step,
)
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.choices import wanted as wanted
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=101, batch_size=8, options={"leave_out": False})
STEPS = 31
"""Two epochs of 13 steps, the last of 5 samples, and 5 steps more."""


@dataclass
class Counted:
    """What a rank saw of a loop by steps, and holds."""

    seen: list[int] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


def plain_loop(loader: Any) -> Any:
    while True:
        yield from loader


def train(task: Task, way: str, n: int) -> Counted:
    """Takes steps by elche's count, or by the loop's own."""
    found = Counted()
    model, optimizer, loader = build(task)
    try:
        with failing_together():
            if way != "plain":
                model, optimizer, loader = begin(task, **task.options)
            if way == "two parts":
                _train(found, model, optimizer, loader.steps(13), 10**9)
                assert elche.progress_steps() == 13.0
            batches = loader.steps(n) if way in ("steps", "two parts") else None
            is_slow = way == "one is slow" and elche.rank() == 1
            most = 10**9 if batches is not None or is_slow else n
            _train(found, model, optimizer, batches or plain_loop(loader), most)
            if way in ("steps", "two parts"):
                assert list(loader.steps(n)) == list(loader.steps(n - 5)) == []
                found.progress.append(elche.progress_steps())
    except ElcheError as error:
        found.error = str(error)
    try:
        elche.shutdown()
    except ElcheError as error:
        found.error = found.error or str(error)
    found.state = state_of(model)
    return found


def _train(found: Counted, model: Any, optimizer: Any, batches: Any, most: int) -> None:
    for number, (x, y, index, _) in enumerate(batches):
        run = current_run()
        if run is None or run.current_samples:
            found.seen += index.tolist()
        found.progress.append(elche.progress_steps())
        take_step(model, optimizer, x, y)
        if number + 1 == most:
            break


@pytest.fixture(scope="module")
def alone() -> Counted:
    """The steps of a plain process."""
    return train(TASK, "plain", STEPS)


@pytest.mark.parametrize("way", ["steps", "two parts", "own count"])
def test_steps_of_sync_are_one_process_steps(
    ranks2: RankPool, alone: Counted, way: str
) -> None:
    ranks = ranks2.serve(train, TASK, way, STEPS)
    assert [rank.error for rank in ranks] == ["", ""]
    assert sorted(ranks[0].seen + ranks[1].seen) == sorted(alone.seen)
    assert identical([rank.state for rank in ranks])
    assert difference(ranks[0].state, alone.state) <= 1e-5
    steps = [float(step) for step in range(STEPS + (way != "own count"))]
    assert [rank.progress for rank in ranks] == [steps, steps]


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_windows_take_the_samples_of_as_many_steps(
    ranks2: RankPool, alone: Counted, policy: str
) -> None:
    """Each once, those of the last epoch's first steps as well; all ranks end equal."""
    task = dataclasses.replace(TASK, options={"policy": policy})
    ranks = ranks2.serve(train, task, "steps", STEPS, env=FOUR_TO_ONE)
    assert [rank.error for rank in ranks] == ["", ""]
    assert sorted(ranks[0].seen + ranks[1].seen) == sorted(alone.seen)
    assert identical([rank.state for rank in ranks])
    assert [rank.progress[-1] for rank in ranks] == [STEPS, STEPS]
    assert all(0.0 <= at <= STEPS for rank in ranks for at in rank.progress)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_count_of_own_batches_in_windows_says_what_is_owed(
    ranks2: RankPool, policy: str
) -> None:
    # Once: "rank 1 opens epoch 5, but ranks [0] have left: run the same epochs".
    task = dataclasses.replace(TASK, options={"policy": policy})
    ranks = ranks2.serve(train, task, "one is slow", STEPS)
    (said,) = [rank.error for rank in ranks if rank.error]
    assert f"left inside an epoch after {STEPS} batches of its own" in said
    assert f"of {STEPS} steps are missing. Write `for batch in loader.steps(31)" in said


def _differently(policy: str) -> None:
    model, optimizer, loader = begin(TASK, policy=policy)
    for x, y, *_ in loader.steps(4 + elche.rank()):
        take_step(model, optimizer, x, y)


def test_other_numbers_of_steps_are_refused(ranks2: RankPool) -> None:
    for said in ranks2.serve(error_of, _differently, "sync"):
        assert "rank 1 asks for 5 steps more, rank 0 for 4 steps more" in said


def _break_off(policy: str) -> tuple[list[int], list[float]]:
    """Rank 1 breaks off in the eighth of its steps, then all go on to the end."""
    model, optimizer, loader = begin(TASK, policy=policy)
    taken, ends = [], []
    for attempt in range(2):
        taken.append(0)
        for x, y, *_ in loader.steps(STEPS):
            take_step(model, optimizer, x, y)
            taken[-1] += 1
            if attempt == 0 and elche.rank() == 1 and taken[-1] == 2:
                break
        ends.append(elche.progress_steps())
    elche.shutdown()
    return taken, ends


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_break_ends_the_steps_for_all_and_the_rest_is_still_to_take(
    ranks2: RankPool, policy: str
) -> None:
    found = ranks2.serve(_break_off, policy)
    assert found[0][1] == found[1][1]
    (taken, ends), _ = found
    assert 1.0 <= ends[0] < 13.0
    assert STEPS <= ends[1] < STEPS + 1.0
    assert all(taken)


def _averaged(policy: str) -> int:
    model, optimizer, loader = begin(TASK, policy=policy)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y, *_ in loader.steps(STEPS):
        take_step(model, optimizer, x, y)
        average.update_parameters(model)
    elche.shutdown()
    return int(average.n_averaged)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("policy", ["sync", "cadence", "auto"])
def test_an_average_is_updated_as_often_as_steps_are_taken(
    ranks2: RankPool, policy: str
) -> None:
    """Also in the last epoch, of which there are only the first steps."""
    # Once it lacked one where windows took over in an epoch with a short last batch.
    found = ranks2.serve(_averaged, policy, env=FOUR_TO_ONE)
    assert found == [STEPS, STEPS]


def _by_next(policy: str) -> str:
    """What is said where a loop asks for more batches than there are for all ranks."""
    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(said),
            contextlib.suppress(StopIteration),
            failing_together(),
        ):
            model, optimizer, loader = begin(TASK, policy=policy)
            batches = iter(loader)
            for _ in range(2 * len(loader) + 1):
                x, y, *_ = next(batches)
                take_step(model, optimizer, x, y)
    except ElcheError as error:  # the other rank has met the end before
        if policy == "sync":
            raise
        return str(error)
    return said.getvalue()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_loop_over_next_that_finds_no_batch_is_told_what_to_write(
    ranks2: RankPool, policy: str
) -> None:
    # Once a bare StopIteration, which says nothing of parts of an epoch.
    advice = "write `for batch in loader:`, or `for batch in loader.steps(n):`"
    for said in ranks2.serve(_by_next, policy):
        assert (advice in said) == (policy != "sync")
