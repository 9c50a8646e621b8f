"""Records: what is no division of its epoch is refused, and nobody waits for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.epoch_plan import PLAN_VERSION, EpochPlan
from elche.errors import ConfigError

SIZES = ((8, 4), (3, 1))


def read(policy: str, **changes: Any) -> EpochPlan:
    plan: dict[str, Any] = {
        "version": PLAN_VERSION,
        "policy": policy,
        "world_size": 2,
        "sizes": SIZES,
        "windows": [],
        "steps": [],
    }
    return EpochPlan.from_text(
        json.dumps({**plan, **changes}), policy, 2, BatchSizes(SIZES)
    )


def window(*parts: list[tuple[int, int]]) -> dict[str, Any]:
    return {"parts": parts, "adopt_at": [0] * len(parts)}


def test_divisions_are_read() -> None:
    steps = [(0, 1, [4, 4]), (1, 4, [8, 0]), (4, 5, [1, 2])]
    assert read("sync", steps=steps).steps == steps
    windows = [window([(0, 2)], [(2, 3)]), window([(4, 5)], [(3, 4)])]
    assert len(read("cadence", windows=windows).windows) == 2
    # An epoch that a loop has left: what was not trained on is in no window.
    assert len(read("cadence", windows=windows[:1]).windows) == 1


@pytest.mark.parametrize(
    "steps",
    [
        [(0, 4, [4, 4])],
        [(0, 5, [4, 4])],
        [(0, 4, [4, 4]), (3, 5, [1, 2])],
        [(0, 4, [4, 3]), (4, 5, [1, 2])],
        [(0, 4, [9, -1]), (4, 5, [1, 2])],
        [(0, 4, [8]), (4, 5, [3])],
        [(0, 4, [4, 4]), (4, 10**9, [1, 2])],
        [(4, 0, [4, 4])],
        [("a", 4, [4, 4])],
        [],
    ],
)
def test_steps_that_are_no_division_are_refused(steps: list[Any]) -> None:
    with pytest.raises(ConfigError, match="this record is no division of its epoch"):
        read("sync", steps=steps)


@pytest.mark.parametrize(
    "windows",
    [
        [window([(0, 3)], [(2, 4)])],
        [window([(0, 2)], [(2, 3)]), window([(1, 2)], [])],
        [window([(2, 1)], [])],
        [window([(-1, 1)], [])],
        [window([(0, 10**9)], [])],
        [window([(0, 1)])],
        [window([(0, 1)], [], [])],
        [{**window([(0, 1)], []), "adopt_at": [0]}],
    ],
)
def test_windows_that_are_no_division_are_refused(windows: list[Any]) -> None:
    # Once: ranks waited for batches that nobody had, to the deadline.
    with pytest.raises(ConfigError, match="this record is no division of its epoch"):
        read("cadence", windows=windows)
