"""The check for leaks finds each kind, and nothing where nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.harness import leaks

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
LAUNCHER = f"""
import subprocess
silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(subprocess.Popen({SLEEPER!r}, **silent).pid)
"""


def test_process_is_found_and_killed() -> None:
    before = leaks.snapshot()
    child = subprocess.Popen(SLEEPER)
    (line,) = leaks.leaks_since(before, grace_s=0)
    assert line.startswith(f"process {child.pid}: ")
    assert "signal.pause()" in line
    assert child.wait(timeout=100) == -9
    assert leaks.leaks_since(before, grace_s=0) == []


@pytest.mark.skipif(not leaks.adopt_orphans(), reason="only Linux adopts orphans")
def test_orphan_of_a_launcher_is_found() -> None:
    before = leaks.snapshot()
    launched = subprocess.run(
        [sys.executable, "-c", LAUNCHER], capture_output=True, text=True, check=True
    )
    orphan = int(launched.stdout)
    (line,) = leaks.leaks_since(before, grace_s=0)
    assert line.startswith(f"process {orphan}: ")
    os.waitpid(orphan, 0)


def test_thread_is_found_unless_it_is_a_daemon() -> None:
    before = leaks.snapshot()
    end = threading.Event()
    threads = [
        threading.Thread(target=end.wait, name="daemon", daemon=True),
        threading.Thread(target=end.wait, name="stray"),
    ]
    for thread in threads:
        thread.start()
    assert leaks.leaks_since(before, grace_s=0) == ["non-daemon thread 'stray'"]
    end.set()
    for thread in threads:
        thread.join()
    assert leaks.leaks_since(before, grace_s=0) == []
