"""`elche run` where the coordinator is killed: training goes on, and counts once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import ChaosConfig, RunAccount, one_run
from benchmarks.chaos_killer import BOTH, coordinator_pid
from elche.monitor.run_history import RunHistory
from tests.harness.printing import environment_of
from tests.harness.waiting import until

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).parents[1] / "process" / "cases"
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks, which compile nothing."""
    monkeypatch.setenv("PYTHONPATH", environment_of()["PYTHONPATH"])


def disturbed(policy: str, seconds: float, mtbf_s: float, **more: str) -> RunAccount:
    """A run of three ranks by three accounts, while the coordinator is killed."""
    config = ChaosConfig(ranks=3, mtbf_s=mtbf_s, policy=policy, **more)  # type: ignore[arg-type]
    run = one_run(config, random.Random(2), seconds, mtbf_s)
    assert run.coordinators, "no coordinator was killed"
    assert not run.faults(), run
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_coordinators_and_ranks_killed_at_any_moment(policy: str) -> None:
    run = disturbed(policy, 20.0, 1.5, victims=BOTH)
    assert run.kills, "no rank was killed"


def test_each_sample_and_each_event_counts_once(tmp_path: Path) -> None:
    """One dies before any rank has come, and one in each epoch; the next reads on."""
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "elche", "run", "--nproc", "2"]
    command += ["--events", str(tmp_path)]
    process = subprocess.Popen(
        [*command, str(SCRIPTS / "outlived.py"), "9", "nobody", "sync"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(),
    )
    killed = []
    for begun in ("", '"kind":"epoch","epoch":0', '"kind":"epoch","epoch":1'):
        until(lambda: not begun or (path.exists() and begun in path.read_text()))  # noqa: B023 - now
        until(lambda: coordinator_pid(process.pid) not in (None, *killed))
        pid = coordinator_pid(process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert output.count("of 2: 800 samples") == 2, output + errors
    assert errors.count("a new one continues the run") == 3, errors
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
