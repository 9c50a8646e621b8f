"""`elche run` where the coordinator is killed: training goes on, and counts once."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import ChaosConfig, one_run
from benchmarks.chaos_killer import BOTH, coordinator_pid
from elche.monitor.run_history import RunHistory
from tests.harness.printing import environment_of, started
from tests.harness.waiting import until

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).parents[1] / "process" / "cases"


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks, which compile nothing."""
    monkeypatch.setenv("PYTHONPATH", environment_of()["PYTHONPATH"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_coordinators_and_ranks_killed_at_any_moment(policy: str) -> None:
    """Each position is once in the model, which all ranks hold alike."""
    config = ChaosConfig(ranks=3, mtbf_s=1.5, policy=policy, victims=BOTH)
    run = one_run(config, random.Random(2), 20.0, 1.5)
    assert run.coordinators, "no coordinator was killed"
    assert run.kills, "no rank was killed"
    assert not run.faults(), run


def test_each_sample_and_each_event_counts_once(tmp_path: Path) -> None:
    """One dies before any rank has come, and one in each epoch; the next reads on."""
    path = tmp_path / "events.jsonl"
    options = "-m", "elche", "run", "--nproc", "2", "--events", str(tmp_path)
    words = str(SCRIPTS / "outlived.py"), "9", "nobody", "sync"
    killed: list[int | None] = [None]
    with started(tmp_path, [sys.executable, *options, *words]) as [run]:
        for begun in ("", '"kind":"epoch","epoch":0', '"kind":"epoch","epoch":1'):
            until(lambda: not begun or (path.exists() and begun in path.read_text()))  # noqa: B023 - now
            until(lambda: coordinator_pid(run.process.pid) not in killed)
            pid = coordinator_pid(run.process.pid)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        assert run.end() == 0, run.output
    assert run.output.count("of 2: 800 samples") == 2, run.output
    assert run.output.count("a new one continues the run") == 3, run.output
    history = RunHistory()
    history.feed(path.read_text())
    assert [each["epoch"] for each in history.epochs] == [0, 1]
    assert sum(sum(each["rank_samples"]) for each in history.windows) == 800
    assert history.windows[-1]["samples"] == 800
    # Others may be there: on a busy machine a rank may be slow.
    left = [each["rank"] for each in history.events if each["name"] == "left"]
    assert sorted(left) == [0, 1]
    assert history.end is not None
    assert history.end["exit_codes"] == [0, 0]
