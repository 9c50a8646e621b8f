"""SIGTERM and SIGINT to `elche run` end a Trainer with a result on all ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runtime.process.test_launcher import started

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = str(Path(__file__).parent / "cases" / "trainer_script.py")


@pytest.mark.parametrize(
    ("policy", "number", "code", "saves"),
    [
        ("sync", signal.SIGTERM, 143, False),
        ("sync", signal.SIGTERM, 143, True),
        ("cadence", signal.SIGINT, 130, False),
        ("async", signal.SIGTERM, 143, True),
    ],
)
def test_ranks_end_with_a_result(
    tmp_path: Path, policy: str, number: signal.Signals, code: int, *, saves: bool
) -> None:
    more = [str(tmp_path / "checkpoints")] if saves else []
    with started(tmp_path, "--nproc", "2", SCRIPT, policy, *more) as run:
        run.wait_for("20 batches", 2)
        run.process.send_signal(number)
        assert run.end() == code
        first, second = run.wait_for(r"ended by (.*)\n", 2)
        assert first == second
        assert first.startswith(f"{number.name}: ")
        assert "Traceback" not in run.output
    assert len(list(tmp_path.glob("checkpoints/*/manifest.json"))) == saves
