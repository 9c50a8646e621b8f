"""`elche run` where a rank dies: what goes on, and what ends, by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

CASES = Path(__file__).parent / "cases"


def run(
    ranks: int,
    *words: str,
    script: str = "outlived.py",
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """The script by `elche run`."""
    launcher = sys.executable, "-m", "elche", "run", "--nproc", str(ranks), *options
    return subprocess.run(
        [*launcher, str(CASES / script), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize(
    ("policy", "rank"),
    [
        ("cadence", 1),
        pytest.param("cadence", 0, marks=pytest.mark.slow),
        pytest.param("async", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_outlived(policy: str, rank: int) -> None:
    ended = run(3, str(rank), "kill", policy)
    others = ", ".join(str(each) for each in range(3) if each != rank)
    assert ended.returncode == 0, ended.stderr
    assert f"elche: rank {rank} died: going on with ranks {others}" in ended.stderr
    assert f"ranks [{rank}] ended with codes [137 (SIGKILL)]" in ended.stderr
    done = dict(re.findall(r"done (\d) of 2: 800 samples, sum (.+)", ended.stdout))
    assert sorted(done) == ["0", "1"], ended.stdout + ended.stderr
    assert len(set(done.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("0 kill cadence own", 137, "from the script's own Evens, which no other rank"),
        ("1 kill sync", 137, "the death of a rank ends policy='sync'"),
        ("1 kill async mortal", 137, "the death of a rank ends survive=False"),
        ("1 raise cadence", 1, "ValueError: a fault in user code"),
        ("1 quit async", 7, "rank 1 failed: its process ended with code 7"),
    ],
)
def test_what_a_run_does_not_outlive(words: str, code: int, says: str) -> None:
    ended = run(3, *words.split())
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr
    assert "done" not in ended.stdout


@pytest.mark.slow
def test_a_long_evaluation_is_no_death_and_others_say_where_it_is() -> None:
    ended = run(3, "1", "sleep", "cadence", "25")
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"the run has been waiting for ranks \[1\].* for 10 s: rank 1 is at <module> "
        r"\(.*outlived.py:\d+\)",
        ended.stderr,
    ), ended.stderr
    assert ended.stdout.count("of 3: 800 samples") == 3


@pytest.mark.parametrize(
    "policy", ["cadence", pytest.param("async", marks=pytest.mark.slow)]
)
def test_another_process_takes_the_place_of_a_killed_one(policy: str) -> None:
    ended = run(3, policy, script="rejoined.py", options=("--rejoin", "1"))
    assert ended.returncode == 0, ended.stderr
    assert "elche: rank 1 died: going on with ranks 0, 2" in ended.stderr
    assert "elche: rank 3 joined: going on with ranks 0, 2, 3" in ended.stderr
    done = dict(re.findall(r"done (\d) of 3: sum (.+)", ended.stdout))
    assert sorted(done) == ["0", "1", "2"], ended.stdout + ended.stderr
    assert len(set(done.values())) == 1


@pytest.mark.slow
def test_another_process_joins_a_trainer(tmp_path: Path) -> None:
    words = str(tmp_path), "cadence"
    ended = run(3, *words, script="rejoined_trainer.py", options=("--rejoin", "1"))
    assert ended.returncode == 0, ended.stderr
    assert "elche: rank 3 joined: going on with ranks 0, 2, 3" in ended.stderr
    done = dict(re.findall(r"done (\d): sum (.+)", ended.stdout))
    assert sorted(done) == ["0", "2", "3"], ended.stdout + ended.stderr
    assert len(set(done.values())) == 1
