"""An error in a process that a rank has forked is not that rank's."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from elche.runtime.process.shutdown import watch_process

def fail():
    error = ConnectionResetError("of its dead parent")  # as multiprocessing reports it
    sys.excepthook(type(error), error, None)

watch_process(lambda error: os.write(1, b"failed "), lambda: None)
if os.fork() == 0:
    fail()
    os._exit(0)
os.wait()
os.write(1, b"waited ")
fail()
"""


def test_only_the_rank_itself_says_that_it_has_failed() -> None:
    """Once: a killed rank's loader worker ended the run that had outlived it."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.stdout.split() == [b"waited", b"failed"]
    assert done.stderr.count(b"ConnectionResetError: of its dead parent") == 2
