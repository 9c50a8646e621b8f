"""Programs that end well, and what they print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments: str) -> str:
    """What a Python program has printed at its end, run in the repository's root."""
    ended = subprocess.run(
        (sys.executable, *arguments),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return ended.stdout
