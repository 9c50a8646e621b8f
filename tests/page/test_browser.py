"""The page in Chromium: a run's records from the first to the last, at any width."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.event_lines import event, lines, records
from tests.harness.waiting import until
from tests.page.conftest import Browser

SCRIPT = Path(__file__).with_name("cases") / "endless.py"
Serve = Callable[[Path], str]


def test_late_opening_and_reload_show_the_whole_run(
    tmp_path: Path, served: Serve, browser: Browser
) -> None:
    end = {"t": 1.8e9 + 60, "kind": "end", "exit_codes": [0, 0], "reason": ""}
    found = [*records(50), event("died", 20.5, rank=1), end]
    (tmp_path / "events.jsonl").write_text(lines(*found))
    browser.open(served(tmp_path))
    for _ in range(2):
        assert browser.column("rows", "samples") == [120 * n for n in range(1, 51)]
        assert browser.column("events", "text") == ["rank 1 died: died <script>"]
        assert "The run has ended" in browser.text("head")
        assert "died <script>" in browser.text("list")
        browser.driver.refresh()
        browser.wait_loaded()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("theme", "is_dark"), [("light", False), ("dark", True)])
def test_it_fits_and_follows_the_systems_theme(
    tmp_path: Path,
    served: Serve,
    browser: Browser,
    width: int,
    theme: str,
    is_dark: bool,
) -> None:
    found = [
        *records(90, ranks=3),
        event("checkpoint", 30),
        event("died", 70.5, rank=2),
    ]
    (tmp_path / "events.jsonl").write_text(lines(*found))
    browser.prefer(theme)
    browser.resize(width)
    browser.open(served(tmp_path))
    until(lambda: len(browser.column("rows", "samples")) == 90, poll_s=0.1)
    style = "return getComputedStyle(document.body)"
    red = re.findall(r"\d+", browser.driver.execute_script(f"{style}.backgroundColor"))
    assert (int(red[0]) < 128) is is_dark
    overhang = "return document.documentElement.scrollWidth - innerWidth"
    assert browser.driver.execute_script(overhang) <= 0
    assert browser.save(f"{width}-{theme}").stat().st_size > 20_000
    browser.prefer("light")


def test_it_waits_for_a_run_and_follows_a_replaced_file(
    tmp_path: Path, served: Serve, browser: Browser
) -> None:
    browser.open(served(tmp_path))
    until(lambda: "has not begun" in browser.text("head"), poll_s=0.1)
    path, found = tmp_path / "events.jsonl", [*records(10)]
    path.write_text(lines(*found[:8]) + '{"t": 1, "ki')
    until(lambda: len(browser.column("rows", "samples")) == 3, poll_s=0.1)
    new = tmp_path / "new"
    new.write_text(lines(*found, event("joined", 3)))
    new.replace(path)
    until(lambda: len(browser.column("rows", "samples")) == 10, poll_s=0.1)
    until(lambda: len(browser.column("events", "text")) == 1, poll_s=0.1)


@pytest.mark.timeout(400)
def test_a_run_trains_and_loses_a_rank(tmp_path: Path, browser: Browser) -> None:
    command = ["elche", "run", "--page", "--events", str(tmp_path / "run"), "--quiet"]
    ranks = ["--speeds", "1,0.5", "--policy", "cadence", str(SCRIPT), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", *command, *ranks], stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stderr is not None
            browser.open(run.stderr.readline().removeprefix("elche run: ").strip())
            until(lambda: len(browser.column("rows", "samples")) > 3, poll_s=0.2)
            assert browser.column("rows", "value_0")
            os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
            file = tmp_path / "run" / "events.jsonl"
            until(lambda: '"died"' in file.read_text())
            began_s = time.monotonic()
            is_shown = "rank 1 died"
            until(lambda: is_shown in "".join(browser.column("events", "text")))
            delay_s = time.monotonic() - began_s
            shown = len(browser.column("rows", "samples"))
            until(lambda: len(browser.column("rows", "samples")) > shown, poll_s=0.2)
            browser.save("live")
        finally:
            browser.driver.get("about:blank")
            run.send_signal(signal.SIGINT)
            _, said = run.communicate(timeout=100)
    assert "shows it again" in said
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert delay_s < 2.0 * crowd
