"""Pipelines under `elche run` that are stopped by a signal."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from elche.checkpoint.store import CheckpointStore
from tests.harness.printing import ended, started
from tests.pipeline.cases.pipeline_cases import loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    EPOCHS,
    make_layers,
    make_loader,
    make_optimizer,
)

pytestmark = pytest.mark.distributed

CASES = Path(__file__).parents[1] / "cases"
SCRIPT = CASES / "restarted_script.py"


def command(folder: Path, stopped_at: int, *options: str) -> list[str]:
    words = f"elche run --nproc 2 --checkpoint-dir {folder} --checkpoint-every 0.01"
    script = str(SCRIPT), str(folder), str(stopped_at)
    return [sys.executable, "-m", *words.split(), *options, *script]


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
    with started(tmp_path, command(tmp_path, 6)) as [run]:
        run.wait_for("step 6\n")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143, run.output
        assert "elche: last checkpoint: " in run.output
    with started(tmp_path, command(tmp_path, 0, "--resume")) as [again]:
        assert again.end() == 0, again.output
    assert check(tmp_path)[6] == 7, "nothing was lost"


def test_a_script_that_does_not_close_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    script = str(CASES / "left_open_script.py")
    done = ended("-m", "elche", "run", "--nproc", "2", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path).newest() is not None
