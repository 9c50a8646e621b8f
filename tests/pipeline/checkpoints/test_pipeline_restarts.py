"""Pipelines under `elche run` that are stopped by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from elche.checkpoint.store import CheckpointStore
from tests.pipeline.cases.pipeline_cases import loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    EPOCHS,
    make_layers,
    make_loader,
    make_optimizer,
)

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).parents[1] / "cases"
SCRIPT = CASES / "restarted_script.py"


def start(folder: Path, stopped_at: int, *options: str) -> subprocess.Popen[str]:
    words = f"--nproc 2 --checkpoint-dir {folder} --checkpoint-every 0.01".split()
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "elche", "run", *words, *options),
            *(str(SCRIPT), str(folder), str(stopped_at)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )


def expected() -> dict[int, float]:
    whole = nn.Sequential(*make_layers())
    optimizer = make_optimizer(whole.parameters())
    torch.manual_seed(3)
    loader, losses = make_loader(), []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(whole(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return dict(enumerate(losses, start=1))


def check(folder: Path) -> list[int]:
    """Compares each loss, those before the stop too; the steps as they came."""
    steps = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    known = expected()
    for step, loss in steps:
        assert loss == pytest.approx(known[step], rel=1e-9)
    assert {step for step, _ in steps} == set(known)
    return [step for step, _ in steps]


@pytest.mark.slow
def test_sigterm_makes_a_last_checkpoint(tmp_path: Path) -> None:
    run = start(tmp_path, 6)
    assert run.stdout is not None
    lines = [run.stdout.readline() for _ in range(6)]
    assert lines[-1] == "step 6\n"
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=100)
    assert run.returncode == 143, errors
    assert "elche: last checkpoint: " in errors
    again = start(tmp_path, 0, "--resume")
    _, errors = again.communicate(timeout=100)
    assert again.returncode == 0, errors
    assert check(tmp_path)[6] == 7, "nothing was lost"


def test_a_script_that_does_not_close_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    script = CASES / "left_open_script.py"
    words = [sys.executable, "-m", "elche", "run", "--nproc", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    subprocess.run([*words, str(tmp_path)], env=env, check=True, timeout=100)
    assert CheckpointStore(tmp_path).newest() is not None
