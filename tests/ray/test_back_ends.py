"""Supervision of ranks means the same for processes of one machine and on Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import elche.ray
from elche.errors import RemoteRankError
from tests.ray.cases import counted
from tests.ray.test_cluster_run import Counted, check_counts
from tests.runtime.process.cases import supervised

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAIT_S = 250.0


def on_processes(case: Any, *args: object, **options: object) -> str:
    """What went wrong under `elche run`; "" if nothing did."""
    given = [f"--{name.replace('_', '-')}={each}" for name, each in options.items()]
    words = ("--speeds=1,1", *given, case.__file__, *map(str, args))
    ended = subprocess.run(
        (sys.executable, "-m", "elche", "run", *words),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return f"code {ended.returncode}" if ended.returncode else ""


def on_ray(case: Any, *args: object, **options: Any) -> str:
    """What went wrong on Ray; "" if nothing did."""
    ranks = 2 * [elche.ray.RankSpec(resources={"CPU": 0.5})]
    try:
        elche.ray.run(case.__file__, ranks, args=args, speeds=(1.0, 1.0), **options)
    except RemoteRankError as error:
        return str(error)
    return ""


BACK_ENDS = pytest.mark.parametrize("supervise", [on_processes, on_ray])


@BACK_ENDS
def test_the_exit_code_is_that_of_the_rank_that_failed(
    cluster: Any, tmp_path: Path, supervise: Any
) -> None:
    assert supervise(supervised, "exit", tmp_path).endswith("code 3")
    assert not [*tmp_path.glob("ended-*")]


@BACK_ENDS
def test_all_ranks_are_restarted_after_a_death_that_ends_a_run(
    cluster: Any, tmp_path: Path, supervise: Any
) -> None:
    """No epoch has begun: the others do not continue without the dead rank."""
    assert supervise(supervised, "restart", tmp_path).endswith("code 137")
    (tmp_path / "died").unlink()
    assert supervise(supervised, "restart", tmp_path, max_restarts=1) == ""
    assert len([*tmp_path.glob("ended-*")]) == 2


@BACK_ENDS
def test_a_run_pauses_below_min_ranks(
    cluster: Any, tmp_path: Path, supervise: Any
) -> None:
    story = tmp_path / "story.txt"
    options = {"rejoin": 1, "min_ranks": 2, "story": story}
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(supervise, counted, tmp_path, "sync", **options)
        run = Counted(tmp_path, ending)
        run.trains([0, 1])
        os.kill(run.lines(1)[0].pid, signal.SIGKILL)
        run.trains([0, 2], run.trains([2]))
        assert run.stop() == ""
    alone = [each for each in run.lines(0) if each.world == 1]
    assert len(alone) < counted.SAMPLES / counted.BATCH  # what had been granted
    check_counts(run, "sync", 2)
    assert "Regroup" in story.read_text()
