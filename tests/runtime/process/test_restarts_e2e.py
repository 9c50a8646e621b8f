"""Real runs that die and are started anew, from their own states and from elche's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = Path(__file__).parent / "cases"


def run(*words: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    """`elche run`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "elche", "run", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_pipeline_that_saves_by_hand(tmp_path: Path) -> None:
    """It ends with the parameters of a run that was not killed, bit for bit."""
    script, ends = str(CASES / "restarted_pipeline.py"), []
    for name, kill_at in (("whole", "-1"), ("killed", "7")):
        folder = tmp_path / name
        folder.mkdir()
        ended = run(
            *("--nproc", "2", "--max-restarts", "1"), script, str(folder), kill_at
        )
        assert ended.returncode == 0, ended.stderr
        assert ("goes on with step 6" in ended.stdout) == (name == "killed")
        assert ("rank 1 was killed by SIGKILL" in ended.stderr) == (name == "killed")
        ends.append(torch.load(folder / "end.pt", weights_only=True))
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key])
