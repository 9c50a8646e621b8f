"""Events of a real run: a rank that is throttled, and checkpoints."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elche.monitor.run_history import RunHistory
from tests.harness.printing import started
from tests.harness.waiting import until

SCRIPT = Path(__file__).parent / "cases" / "slowed.py"


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_throttled_rank_and_checkpoints_are_events(tmp_path: Path) -> None:
    file, slow, saved = (tmp_path / name for name in ("events.jsonl", "slow", "saved"))
    options = f"--nproc 2 --events {tmp_path} --checkpoint-dir {saved}"
    words = f"elche run --quiet {options} --checkpoint-every 2 {SCRIPT} {slow}"

    def history() -> RunHistory:
        found = RunHistory()
        found.feed(file.read_text() if file.exists() else "")
        return found

    def texts(name: str, rank: int | None) -> list[str]:
        events = history().events
        return [e["text"] for e in events if (e["name"], e["rank"]) == (name, rank)]

    with started(tmp_path, [sys.executable, "-m", *words.split()]) as (run,):
        until(lambda: sum(w["duration_s"] for w in history().windows) > 10, poll_s=0.2)
        slow.touch()
        until(lambda: texts("slower", 1), poll_s=0.2)
        slow.unlink()
        until(lambda: texts("faster", 1), poll_s=0.2)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(100)
    found, last = texts("checkpoint", None), max(saved.glob("checkpoint-*")).name
    assert len({*found}) == len(found) > 1
    assert found[-1].startswith(f"saved/{last}: epoch ")
    assert not texts("error", 0) + texts("error", 1)  # the stop was asked for
