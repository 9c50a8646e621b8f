"""Progress as bars and as log lines."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from elche.monitor.progress import TaskProgress


def test_log_lines_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    caplog.set_level(logging.INFO, "elche.monitor.progress")
    with TaskProgress(interval_s=10.0) as progress:
        progress.start("solo-0", 200)
        for done in range(0, 200, 10):
            now_s += 1.5
            progress.update("solo-0", done, "loss 2.50")
        progress.finish("solo-0", "loss 1.50")
    assert caplog.messages == [
        "solo-0: started",
        "solo-0: 30 %, loss 2.50",
        "solo-0: 65 %, loss 2.50",
        "solo-0: finished after 30.0 s, loss 1.50",
    ]


def test_bars_show_task_and_detail() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with TaskProgress(console) as progress:
        progress.start("[val] elche-sync [/1]", 200)  # none of it is rich's markup
        progress.update("[val] elche-sync [/1]", 100, "loss 2.50")
        progress.finish("[val] elche-sync [/1]", "loss 1.50")
    text = stream.getvalue()
    assert "[val] elche-sync [/1]" in text
    assert "50%" in text
    assert "loss 1.50" in text


def test_a_terminal_gets_bars_and_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "elche.monitor.progress")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with TaskProgress() as progress:
        progress.start("elche-sync", 200)
    assert not caplog.messages
    assert "elche-sync" in sys.stderr.getvalue()  # type: ignore[attr-defined]
