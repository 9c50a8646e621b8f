"""Learning rate schedules of a loop in windows, where ranks run unlike many batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.optim import lr_scheduler

import elche
from elche.errors import ConfigError
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, begin, build, take_step
from tests.harness.choices import wanted as wanted
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

WINDOWS = {"policy": "cadence", "deterministic": True, "max_anchor": 2}
UNEVEN = {**WINDOWS, "speed_hints": (1.0, 0.5)}
EPOCHS = 2
TASK = Task(samples=6 * 8 + 5, batch_size=8)
BATCHES = 7
EVERY = 3


def _warnings(task: Task, schedule: str) -> list[str]:
    """What was warned of in two epochs with this schedule."""
    with logged("elche.runtime.watch.rate_watch") as lines:
        _scheduled(task, schedule)
    return lines


def _scheduled(task: Task, schedule: str) -> None:
    model, optimizer, loader = begin(task, **task.options)
    if "by hand" not in schedule:
        torchs = lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if schedule == "progress":
        ours = elche.ProgressLR(optimizer, lambda done: 1 - done, 2 * task.samples)
    for _ in range(2):
        for number, (x, y, _, _) in enumerate(loader):
            if schedule == "progress":
                ours.step()
            take_step(model, optimizer, x, y)
            if schedule == "batch":
                torchs.step()
            if schedule == "by hand":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            if schedule == "by progress by hand":
                done = elche.progress_steps() / (2 * len(loader))
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - done)
    elche.shutdown()


def test_a_rate_set_by_hand_in_windows_is_warned_of_once(ranks2: RankPool) -> None:
    task = Task(samples=64, batch_size=8, options=WINDOWS)
    for lines in ranks2.run(_warnings, task, "by hand", case_setup=serve_in_thread):
        assert len(lines) == 1
        assert "elche.progress_steps()" in lines[0]
        assert "policy 'cadence'" in lines[0]


@pytest.mark.parametrize(
    "options", [WINDOWS, {"policy": "auto"}], ids=["windows", "auto"]
)
def test_a_scheduler_that_was_not_handed_over_is_refused(
    ranks2: RankPool, options: dict[str, object]
) -> None:
    """Under `auto` before there are windows, not after hours."""
    task = Task(samples=64, batch_size=8, options=options)
    outcomes = ranks2.run(
        _warnings, task, "batch", case_setup=serve_in_thread, expect_failure=True
    )
    errors = [str(each.error) for each in outcomes]
    named = [each for each in errors if "elche.follow(scheduler) after it" in each]
    assert named, errors
    assert "(elche.setup(..., schedulers=[scheduler])" in named[0]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("progress", WINDOWS), ("by progress by hand", WINDOWS), ("batch", {})],
    ids=["by progress", "by progress by hand", "default policy"],
)
def test_rates_that_are_the_same_on_all_ranks_are_not_warned_of(
    ranks2: RankPool, schedule: str, options: dict[str, object]
) -> None:
    """The default policy reduces every batch: a schedule per batch is right there."""
    task = Task(samples=64, batch_size=8, options=options)
    found = ranks2.run(_warnings, task, schedule, case_setup=serve_in_thread)
    assert found == [[], []]


@dataclass
class Schedules:
    """A rate of every kind that the loop moves, and what is left at the end."""

    in_windows: bool = False
    rates: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


def _schedules(options: dict[str, Any] | None) -> Schedules:
    """Two epochs of schedules per batch, per few, and per epoch; None: plain."""
    found = Schedules()
    model, optimizer, loader = build(TASK)
    second, third, fourth = (build(TASK)[1] for _ in range(3))
    schedulers = [
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES),
        lr_scheduler.ExponentialLR(second, 0.9),
        lr_scheduler.ReduceLROnPlateau(third, patience=0),
        lr_scheduler.StepLR(fourth, 1),
    ]
    one_cycle, exponential, plateau, per_epoch = schedulers
    run: Any = None
    if options is not None:
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, schedulers=schedulers[:1], **nested(options)
        )
        for scheduler in schedulers[1:]:
            assert elche.follow(scheduler) is scheduler
        run = current_run()
    for epoch in range(EPOCHS):
        for number, (x, y, *_) in enumerate(loader):
            found.rates.append(one_cycle.get_last_lr()[0])
            take_step(model, optimizer, x, y)
            second.step()
            one_cycle.step()
            if (number + 1) % EVERY == 0:
                exponential.step()
            if run is not None:
                found.in_windows |= isinstance(run.epochs.under_way, WindowEpoch)
        own = 0 if options is None else elche.rank() - 0.5
        plateau.step(1.0 + epoch + own)
        fourth.step()
        per_epoch.step()
        found.states.append(str([each.state_dict() for each in schedulers]))
        found.states.append(str(optimizer.param_groups[0]["momentum"]))
    elche.shutdown()
    found.states.append(str([each.state_dict() for each in schedulers]))
    return found


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    "options",
    [
        UNEVEN,
        {**UNEVEN, "update": "gradients"},
        {"policy": "async"},
        {"policy": "auto"},
    ],
    ids=["cadence", "gradients", "async", "auto"],
)
def test_schedules_end_where_one_device_ends(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    plain = _schedules(None)
    for rank in ranks2.run(_schedules, options, case_setup=serve_in_thread):
        assert rank.in_windows
        assert rank.states == plain.states
        on_the_way = [plain.rates.index(rate) for rate in rank.rates]
        assert on_the_way == sorted(on_the_way)


def test_what_is_no_scheduler_is_refused() -> None:
    model, optimizer, loader = build(TASK)
    said = r"expected a scheduler of torch\.optim\.lr_scheduler, got function"
    with pytest.raises(ConfigError, match=said):
        elche.follow(lambda step: 1.0)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=said):
        elche.setup(model, optimizer, loader, schedulers=[lambda step: 1.0])  # type: ignore[list-item]


def test_there_is_nothing_to_follow_before_setup() -> None:
    scheduler = lr_scheduler.StepLR(build(TASK)[1], 1)
    with pytest.raises(ConfigError, match=r"elche\.follow\(\) needs a run"):
        elche.follow(scheduler)


@pytest.mark.usefixtures("plain_environment")
def test_one_device_steps_by_itself() -> None:
    alone = _schedules({"policy": "cadence"})
    assert alone.rates == _schedules(None).rates
