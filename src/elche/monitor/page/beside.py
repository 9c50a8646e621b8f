"""The page of a run in progress: `elche page` as a child process of its launcher."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from elche.errors import ConfigError

START_S: Final = 120.0
"""Most time (s) for a page to start, before its run."""


def new_folder(name: str) -> Path:
    """Returns a folder for a run's events that is named by its script and the time."""
    stem = re.sub(r"[^\w.-]+", "_", Path(name).stem) or "run"
    return Path("elche_runs", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


@contextmanager
def page_beside(folder: Path, at: str, say: Callable[[str], None]) -> Iterator[None]:
    """Serves the page of a run's events while the block runs.

    Args:
        folder: the run's folder; it is made if it does not exist.
        at: address as of `elche page --at`; "" for a free port of loopback.
        say: prints a line for the user.

    Raises:
        ConfigError: the page cannot be served; its process has printed why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}") from error
    command = [sys.executable, "-m", "elche", "page", str(folder), "--at", at]
    with subprocess.Popen(
        [*command, "--with-parent"],
        stdin=subprocess.PIPE,  # closed by the system however this process ends
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends the ranks first
    ) as process:
        assert process.stdout is not None
        try:
            is_ready = select.select([process.stdout], [], [], START_S)[0]
            if not (address := is_ready and process.stdout.readline().strip()):
                raise ConfigError("the page could not be started: see its error above")
            say(address)
            yield
            say(f"the page has ended; `elche page {folder}` shows it again")
        finally:
            process.kill()  # SIGTERM would not end a stopped one
