"""Runs that are killed or told to end, and started again: nothing lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "cases" / "killed_script.py"
ROOT = Path(__file__).parents[2]


def start(
    folder: Path, policy: str, epochs: int, samples: int, every_s: float, *more: str
) -> subprocess.Popen[str]:
    """The script on two ranks, with a process group of its own."""
    options = f"--speeds 1,0.5 --policy {policy} --resume --checkpoint-dir {folder}"
    words = [*options.split(), "--checkpoint-every", str(every_s), str(SCRIPT)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "elche", "run", *words),
            *(str(folder), str(epochs), str(samples), *more),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def wait_for_batches(process: subprocess.Popen[str], count: int) -> int:
    """Reads so many batches of a run, or to its end; returns how many there were."""
    assert process.stdout is not None
    for number in range(count):
        if not process.stdout.readline():
            return number
    return count


def assert_once(folder: Path, epochs: int, samples: int) -> None:
    pairs: list[tuple[int, int]] = []
    for rank in range(2):
        pairs += map(tuple, json.loads((folder / f"seen{rank}.json").read_text()))
    assert Counter(pairs) == Counter(
        {(epoch, at): 1 for epoch in range(epochs) for at in range(samples)}
    )


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_sigterm_makes_a_last_checkpoint(policy: str, tmp_path: Path) -> None:
    """The run ends with 143, and goes on from there."""
    process = start(tmp_path, policy, 2, 400, 600.0)
    assert wait_for_batches(process, 12) == 12
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert not (tmp_path / "end.pt").exists()
    assert len(list(tmp_path.glob("checkpoint-*/manifest.json"))) == 1
    again = start(tmp_path, policy, 2, 400, 600.0)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert_once(tmp_path, 2, 400)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_twenty_kills_at_random_moments(policy: str, tmp_path: Path) -> None:
    """Under ``sync`` it ends as a run that was not killed, bit for bit."""
    epochs, samples, draws = 4, 1600, random.Random(policy)
    kept = tmp_path / "killed"
    kept.mkdir()
    kills = 0
    while True:
        process = start(kept, policy, epochs, samples, 0.3, "deterministic")
        wanted = draws.randrange(1, 60) if kills < 20 else 10**9
        if wait_for_batches(process, wanted) < wanted:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        kills += 1
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert kills == 20
    assert_once(kept, epochs, samples)
    if policy == "sync":
        whole = tmp_path / "whole"
        whole.mkdir()
        process = start(whole, policy, epochs, samples, 600.0, "deterministic")
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        ends = [
            torch.load(each / "end.pt", weights_only=True) for each in (kept, whole)
        ]
        for name, value in ends[0].items():
            assert torch.equal(value, ends[1][name])
