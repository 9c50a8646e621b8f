"""SIGTERM and SIGINT to `elche run` end a Trainer with a result on all ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runtime.process.test_launcher import started

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = str(Path(__file__).parent / "cases" / "trainer_script.py")


@pytest.mark.parametrize(
    ("policy", "number", "code"),
    [
        ("sync", signal.SIGTERM, 143),
        ("cadence", signal.SIGINT, 130),
        ("async", signal.SIGTERM, 143),
    ],
)
def test_ranks_end_with_a_result(
    tmp_path: Path, policy: str, number: signal.Signals, code: int
) -> None:
    with started(tmp_path, "--nproc", "2", SCRIPT, policy) as run:
        run.wait_for("20 batches", 2)
        run.process.send_signal(number)
        assert run.end() == code
        first, second = run.wait_for(r"ended by (.*)\n", 2)
        assert first == second
        assert first.startswith(f"{number.name}: ")
        assert "Traceback" not in run.output
