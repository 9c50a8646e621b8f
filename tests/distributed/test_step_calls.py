"""Python calls and files of elche in one steady step under ``sync``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import elche
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

HOME = str(Path(elche.__file__).parent)
WARM, STEPS, CALLS, FILES = 20, 60, 140, 24
BESIDE = {"StepAccount._close", "SyncEpoch._report_in_backward", "Group.wait_until"}
"""Reports, some ten a second, and waits: not counted, since they follow the load."""


def _trace() -> tuple[list[int], list[int]]:
    """Calls and files of each step, from one batch to the next."""
    model, optimizer, loader = begin(Task(samples=8 * STEPS, batch_size=8))
    steps: list[Counter[str]] = []
    beside = 0

    def seen(frame: Any, event: str, argument: object) -> None:
        nonlocal beside
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event in ("call", "return") and name in BESIDE:
            beside += 1 if event == "call" else -1
        elif event == "call" and not beside and path.startswith(HOME):
            steps[-1][path] += 1

    try:
        for x, y, *_ in loader:
            sys.setprofile(None)
            steps.append(Counter())
            sys.setprofile(seen)
            take_step(model, optimizer, x, y)
    finally:
        sys.setprofile(None)
    elche.shutdown()
    steady = steps[WARM:-1]
    return [step.total() for step in steady], [len(step) for step in steady]


def test_a_steady_step_makes_few_calls_in_few_files(ranks2: RankPool) -> None:
    found = ranks2.serve(_trace)
    for calls, files in found:
        assert 50 < median(calls) <= CALLS
        assert 10 < median(files) <= FILES
