"""`elche run` where a rank dies: what goes on, and what ends, by name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.printing import ended

pytestmark = pytest.mark.distributed

CASES = Path(__file__).parent / "cases"


def run(
    ranks: int, *words: str, script: str = "outlived.py", options: str = ""
) -> subprocess.CompletedProcess[str]:
    """The script by `elche run`."""
    launcher = "-m", "elche", "run", "--nproc", str(ranks), *options.split()
    return ended(*launcher, str(CASES / script), *words)


@pytest.mark.parametrize(
    ("policy", "rank"),
    [
        pytest.param("cadence", 1, marks=pytest.mark.slow),
        ("sync", 1),
        pytest.param("sync", 0, marks=pytest.mark.slow),
        pytest.param("async", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_outlived(policy: str, rank: int) -> None:
    done = run(3, str(rank), "kill", policy)
    others = ", ".join(str(each) for each in range(3) if each != rank)
    assert done.returncode == 0, done.stderr
    assert f"elche: rank {rank} died: continuing with ranks {others}" in done.stderr
    assert f"ranks [{rank}] ended with codes [137 (SIGKILL)]" in done.stderr
    sums = dict(re.findall(r"done (\d) of 2: 800 samples, sum (\S+)", done.stdout))
    assert sorted(sums) == ["0", "1"], done.stdout + done.stderr
    assert len(set(sums.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("0 kill cadence own", 137, "from the script's own InOrder, which no other"),
        ("1 quit async", 7, "rank 1 failed: its process ended with code 7"),
    ],
)
def test_what_a_run_does_not_outlive(words: str, code: int, says: str) -> None:
    done = run(3, *words.split())
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "done" not in done.stdout


@pytest.mark.slow
def test_a_long_evaluation_is_no_death_and_others_say_where_it_is() -> None:
    done = run(3, "1", "sleep", "cadence", "25")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"the run has been waiting for ranks \[1\].* for 10 s: rank 1 is at <module> "
        r"\(.*outlived.py:\d+\)",
        done.stderr,
    ), done.stderr
    assert done.stdout.count("of 3: 800 samples") == 3


@pytest.mark.slow
def test_too_few_ranks_pause_until_another_has_joined() -> None:
    options = "--rejoin 1 --min-ranks 3"
    done = run(3, "sync", script="rejoined.py", options=options)
    assert done.returncode == 0, done.stderr
    *_, joined = done.stderr.partition("elche: pausing until 3 ranks are there")
    assert "elche: rank 3 joined: continuing with ranks 0, 2, 3" in joined
    sums = dict(re.findall(r"done (\d) of 3: sum (.+)", done.stdout))
    assert sorted(sums) == ["0", "1", "2"], done.stdout + done.stderr
    assert len(set(sums.values())) == 1
