"""Supervision of ranks means the same for processes of one machine and on Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import elche.ray
from elche.errors import RemoteRankError
from tests.runtime.process.cases import supervised

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(supervised.__file__)
WAIT_S = 250.0


def on_processes(kind: str, folder: Path, max_restarts: int) -> str:
    """What went wrong under `elche run`; "" if nothing did."""
    options = ("--nproc", "2", "--max-restarts", str(max_restarts))
    words = (*options, str(SCRIPT), kind, str(folder))
    ended = subprocess.run(
        (sys.executable, "-m", "elche", "run", *words),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return f"code {ended.returncode}" if ended.returncode else ""


def on_ray(kind: str, folder: Path, max_restarts: int) -> str:
    """What went wrong on Ray; "" if nothing did."""
    ranks = 2 * [elche.ray.RankSpec(resources={"CPU": 0.5})]
    try:
        elche.ray.run(SCRIPT, ranks, args=(kind, folder), max_restarts=max_restarts)
    except RemoteRankError as error:
        return str(error)
    return ""


BACK_ENDS = pytest.mark.parametrize("supervise", [on_processes, on_ray])


@BACK_ENDS
def test_the_exit_code_is_that_of_the_rank_that_failed(
    cluster: Any, tmp_path: Path, supervise: Any
) -> None:
    assert supervise("exit", tmp_path, 0).endswith("code 3")
    assert not [*tmp_path.glob("ended-*")]


@BACK_ENDS
def test_all_ranks_are_restarted_after_a_death_that_ends_a_run(
    cluster: Any, tmp_path: Path, supervise: Any
) -> None:
    """No epoch has begun: the others do not continue without the dead rank."""
    assert supervise("restart", tmp_path, 1) == ""
    assert len([*tmp_path.glob("ended-*")]) == 2
