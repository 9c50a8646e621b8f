"""Real runs that die and are started anew, from their own states and from elche's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DEATHS = 20
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


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_twenty_deaths_in_one_run(tmp_path: Path, policy: str) -> None:
    """Every sample is seen once per epoch, counting what is in the model at the end."""
    checkpoints = tmp_path / "checkpoints"
    ended = run(
        *("--nproc", "2", "--max-restarts", str(DEATHS)),
        *("--checkpoint-dir", str(checkpoints), "--checkpoint-every", "0.5"),
        *(str(CASES / "restarted_loop.py"), str(tmp_path), policy, str(DEATHS)),
        timeout_s=7000,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("was killed by SIGKILL") == DEATHS
    resumed = re.findall(r"anew from (checkpoint-\d+)", ended.stderr)
    assert len(set(resumed)) > DEATHS / 2  # most starts have won something
    counts = sum(torch.load(tmp_path / f"seen{rank}.pt") for rank in range(2))
    assert torch.equal(counts, torch.full_like(counts, 16))
