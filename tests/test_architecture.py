"""ARCHITECTURE.md names every file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "elche"
HEADING = "## All files"


def test_every_file_is_named_and_every_name_is_a_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = re.findall(r"^- `([\w/]+\.py)`: \S", text.partition(HEADING)[2], re.M)
    files = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if path.name != "__init__.py"
    }
    missing, gone = sorted(files - set(listed)), sorted(set(listed) - files)
    assert not missing, f"expected in {HEADING!r}, with what they are for: {missing}"
    assert not gone, f"in {HEADING!r}, but no file: {gone}"
    assert listed == sorted(listed)
