"""The page of a run that `elche.launch` starts, and its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.page_clients import run_with_page, stopped_clients, windows
from elche.errors import ConfigError
from elche.monitor.page import beside
from tests.harness.waiting import is_running, until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

FUNCTION = """
import elche
from pathlib import Path
def main():
    return elche.rank()
elche.launch(main, 1, page=True)
print(*Path("elche_runs").iterdir())
"""


def test_launch_prints_its_pages_address(tmp_path: Path) -> None:
    words = [sys.executable, "-"]
    output = subprocess.check_output(
        words, input=FUNCTION, cwd=tmp_path, text=True, timeout=150
    )
    address, ended, folder = output.splitlines()
    assert address.startswith("http://127.0.0.1:")
    assert ended == f"the page has ended; `elche page {folder}` shows it again"
    assert (tmp_path / folder / "events.jsonl").exists()


def children() -> set[int]:
    listed = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in listed for pid in each.read_text().split()}


def test_a_stopped_page_does_not_hold_its_run(tmp_path: Path) -> None:
    before = children()
    with beside.page_beside(tmp_path, "", lambda _: None):
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        until(lambda: not is_running(pid))
    assert children() == before


def test_a_page_that_does_not_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "START_S", 0.0)
    before = children()
    with (
        pytest.raises(ConfigError, match="could not be started"),
        beside.page_beside(tmp_path, "", print),
    ):
        pytest.fail("the run began")
    assert children() == before
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot make"),
        beside.page_beside(tmp_path / "file" / "run", "", print),
    ):
        pytest.fail("the run began")


def test_a_page_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from elche.monitor.page.beside import page_beside
with page_beside(Path({str(tmp_path)!r}), "", print):
    print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=150
    )
    assert killed.returncode == -signal.SIGKILL
    pid = int(killed.stdout.split()[-1])
    until(lambda: not is_running(pid))


def test_stopped_browsers_hold_neither_the_run_nor_its_page(tmp_path: Path) -> None:
    with run_with_page(tmp_path) as address, stopped_clients(address, 3):
        seen = len(windows(tmp_path))
        until(lambda: len(windows(tmp_path)) > seen + 50, poll_s=0.2)
        with urlopen(address, timeout=60) as page:
            assert page.status == 200
