"""A rank that is stopped and continued by turns, and then left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.rank_pool import RankPool
from tests.runtime.data.cases.seen_cases import LEAST_SHARE, slowed_for_a_while

STOPPED_S, RUNS_S = 0.018, 0.003
BACK_STEPS = 500
"""Some fifty on a quiet machine."""


@contextlib.contextmanager
def slowing_down(folder: Path) -> Iterator[None]:
    """Slows rank 1 down whenever it is asked for."""
    over = threading.Event()

    def slow_down() -> None:
        while not over.wait(RUNS_S):
            if not (folder / "slow").exists():
                continue
            pid = int((folder / "pid-1").read_text())
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_was_stopped_by_turns_has_its_share_back(
    ranks2: RankPool, tmp_path: Path
) -> None:
    with slowing_down(tmp_path):
        found = ranks2.serve(slowed_for_a_while, str(tmp_path), timeout_s=280)
    assert found[0] == found[1]
    before, fallen, back, steps = found[0]
    assert before >= 3 * LEAST_SHARE
    assert 1.0 <= fallen <= LEAST_SHARE
    assert back >= 0.75 * before
    assert steps <= BACK_STEPS
